"""Faults of the machine at every edge of a completion with calls, by a real engine.

What a kill interrupts is tried again, so that nobody sees it in a completion; what fails in every
attempt is lost alone."""

from __future__ import annotations

import pytest

from rlmath.algorithms.types import turn_tokens
from tests.distributed import tool_fault_cases
from tests.distributed.rank_pool import RankPool
from tests.distributed.tool_fault_cases import LOST, SLICES, Faults
from tests.disturbed_sandboxes import EDGES
from tests.tool_models import CODES, make_script_model

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def faults(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = make_script_model(tmp_path_factory.mktemp("script"))
    return ranks.run(1, tool_fault_cases.faults, folder)[0]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("edge", EDGES)
def test_completions_are_the_same_whatever_was_killed_at_an_edge(
    faults: Faults, edge: str, slices: str
) -> None:
    """Slices end with a call that is out. No process is left, or the case would not have ended."""
    disturbed = faults.disturbed[edge, slices]
    assert disturbed.has_killed and disturbed.more_descriptors == 0
    assert disturbed.completions == faults.undisturbed


@pytest.mark.parametrize("slices", SLICES)
def test_a_completion_whose_every_attempt_fails_is_lost_alone(faults: Faults, slices: str) -> None:
    """It has the reason behind what it had sampled; the engine's others are as without a fault."""
    completions = faults.losing[slices]
    lost = completions[LOST]
    assert lost.finish_reason == "lost"
    assert [call.status for call in lost.calls] == ["lost"]
    assert lost.calls[0].code in CODES and "killed from outside" in lost.calls[0].output
    assert turn_tokens(lost) == len(lost.token_ids) > 0
    assert lost.token_ids == faults.undisturbed[LOST].token_ids[: len(lost.token_ids)]
    others = {key: completion for key, completion in completions.items() if key != LOST}
    assert others == {
        key: completion for key, completion in faults.undisturbed.items() if key != LOST
    }
