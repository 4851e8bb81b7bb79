"""What the program of an engine's own rank tells the heartbeat, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.config.schema import Config
from rlmath.run import engine_rank


def test_the_heartbeat_knows_the_step_of_the_weights_and_the_trainers_status_is_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config()
    config = replace(config, rollout=replace(config.rollout, ranks=1), run=replace(config.run, device="cpu"))
    heartbeat = SimpleNamespace(step=0, enter_phase=lambda phase: None, report_progress=object())
    stop = SimpleNamespace(install=lambda: None, done=lambda: None)
    given: dict[str, Any] = {}

    class OneVersion:
        """Takes the weights of step 6."""

        def __init__(self, context: Any) -> None:
            given["context"] = context

        def run(self, on_weights: Callable[[int], None]) -> int:
            on_weights(6)
            return 9

        def close(self) -> None:
            given["closed"] = True

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(engine_rank, "StopRequest", lambda *of: stop)
    monkeypatch.setattr(engine_rank, "open_scorers", lambda config, mesh: nullcontext("workers"))
    monkeypatch.setattr(engine_rank, "join_run", lambda stack, *of: ("bridge", heartbeat))
    monkeypatch.setattr(engine_rank, "EngineRank", OneVersion)
    prepared: Any = SimpleNamespace(config=config, on_rank=lambda *parts, **more: (parts, more))
    assert engine_rank.run_engine_rank(prepared, None) == 9
    assert heartbeat.step == 7 and given["closed"]
    (mesh, _, workers, bridge), more = given["context"]
    assert (mesh.rank, mesh.world_size, workers, bridge) == (0, 1, "workers", "bridge")
    assert more == {"on_progress": heartbeat.report_progress}
