"""Whether an engine gets tools, and that all its ranks are refused alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.config.schema import ToolsConfig
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.called_completions import CalledCompletions
from rlmath.rollout.engine import prepare_environment
from rlmath.rollout.engine_tools import open_tools
from tests.data.chat_templates import chat_tokenizer

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm.distributed import parallel_state  # noqa: E402

TOKENIZER = chat_tokenizer("qwen3")
SECOND_OF_TWO = Mesh(1, 2, 1, 1, engine_size=2)
FENCE = ToolsConfig(format="fence")


def opened(settings: ToolsConfig, continues_noise: bool = True) -> CalledCompletions | None:
    """What the second of an engine's ranks opens."""
    return open_tools(
        settings,
        TOKENIZER,
        SECOND_OF_TWO,
        continues_noise=continues_noise,
        stop_token_ids=(),
    )


def test_without_tools_nothing_is_opened() -> None:
    assert opened(ToolsConfig(), continues_noise=False) is None


def test_an_engine_whose_noise_begins_anew_behind_an_output_is_refused() -> None:
    with pytest.raises(ValueError, match=r'tools.format is "fence".*Set tools.format=null'):
        opened(FENCE, continues_noise=False)


@pytest.mark.parametrize("errors", [[], [RuntimeError("no sandbox")]])
def test_all_ranks_of_an_engine_learn_what_its_leader_lacks(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> None:
    """The second rank opens no sandbox; vLLM's group gives it what the first one has."""
    shared: list[Any] = []
    from_leader = iter([errors, [None]])

    def broadcast_object(items: list[Any], src: int) -> list[Any]:
        shared.append((items, src))
        return next(from_leader)

    group = SimpleNamespace(broadcast_object=broadcast_object)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    if errors:
        with pytest.raises(RuntimeError, match="no sandbox"):
            opened(FENCE)
    else:
        tools = opened(FENCE)
        assert tools is not None and len(tools) == 0
    assert shared[0] == ([], 0)
    assert all(src == 0 for _, src in shared)
