"""What the ranks do in the tests of the memory switch.

A real policy and a real engine take turns, undisturbed and with a failure in every place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlmath.algorithms.types import Sample
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.rollout.engine_sleep import cache_storages
from rlmath.rollout.memory_monitor import MemoryMonitor
from rlmath.rollout.memory_switch import MemorySwitch
from tests.distributed.engine_cases import _pack_all, completions_of, open_engine, pair
from tests.distributed.offload_cases import EVERYTHING, measured, parameters_of, state_of
from tests.distributed.policy_cases import (
    Case,
    Stage,
    build,
    by_sample,
    microbatches,
    whole_tensors,
)
from tests.tiny_models import make_samples

NO_LIMIT = 2**60


class Rig:
    """A policy that has learned once, and an engine.

    All of the policy's memory is in sets that can leave."""

    def __init__(self, folder: Path, case: Case, engine_size: int) -> None:
        from rlmath.models.offload import training_sets

        self.stage: Stage = build(folder, case)
        self.engine = open_engine(folder, engine_size, self.stage.device)
        self.sync = pair(self.stage, self.engine, engine_size).sync
        self.sets = training_sets(self.stage.actor, None, EVERYTHING, self.stage.device)
        self.timers = PhaseTimers()
        self.learn(0)

    def learn(self, seed: int) -> None:
        batches = microbatches(self.stage, make_samples(8, seed=seed))
        assert self.stage.actor.learner.learn(batches, None, None).discarded is None

    def switch(
        self,
        sync: Callable[[int], Any] | None = None,
        training: Any = None,
        monitor: MemoryMonitor | None = None,
    ) -> MemorySwitch:
        return MemorySwitch(
            self.engine,
            training or self.sets,
            sync or (lambda step: self.sync.run()),
            monitor or MemoryMonitor(NO_LIMIT, stop=False, rank=0),
            self.timers,
            self.stage.device,
        )

    def engine_bytes(self) -> int:
        """What the engine's weights and its KV cache really hold."""
        (cache,) = self.engine._llm.collective_rpc(lambda worker: cache_storages(worker))
        (model,) = self.engine._llm.collective_rpc(lambda worker: worker.get_model())
        storages = [*cache, *(parameter.untyped_storage() for parameter in model.parameters())]
        packed = [
            module for module in model.modules() if getattr(module, "cpu_linear", None) is not None
        ]
        return sum(storage.nbytes() for storage in storages) + len(packed)

    def requests(self, step: int) -> list[Any]:
        """Requests of different lengths: some are still running when the first is finished."""
        from rlmath.rollout.sampling import Request

        return [Request((p, 0), (5 + p, 6, 7), 10 * step + p, 0, 6 * (p + 1)) for p in range(4)]

    def generate(self, step: int) -> dict[Any, Any]:
        return completions_of(self.engine, self.requests(step))

    def begun(self) -> Any:
        """A generator of completions."""
        return self.engine.running_completions().sample(self.requests(1))

    def mismatch(self, generated: dict[Any, Any]) -> float:
        """Largest difference of log-probs to the policy as it is now (nats).

        It is 0 off the last stage."""
        samples = [
            Sample((5 + p, 6, 7), completion.token_ids, completion.logprobs, 1.0)
            for (p, _), completion in generated.items()
        ]
        batches = _pack_all(samples, self.stage.mesh)
        results = self.stage.actor.forward_backward.logprobs(batches)
        if not self.stage.mesh.is_last_stage:
            return 0.0
        policy_logprobs = by_sample(batches, results)
        return max(
            abs(a - b)
            for index, sample in enumerate(samples)
            for a, b in zip(policy_logprobs[index], sample.behaviour_logprobs, strict=True)
        )

    def look(self) -> dict[str, Any]:
        return {
            "away": self.sets.offloaded,
            "engine": self.engine.memory.state,
            "training bytes": measured(self.stage),
            "engine bytes": self.engine_bytes(),
            "version": self.engine.version,
        }


def cycles(folder: Path, case: Case, engine_size: int, count: int) -> list[dict[str, Any]]:
    """What is where at the three stations of a cycle, again and again."""
    rig = Rig(folder, case, engine_size)
    reports = []
    looks: dict[str, Any] = {}

    def sync(step: int) -> None:
        looks["sync"] = rig.look()
        rig.sync.run()

    switch = rig.switch(sync)
    for number in range(count):
        before = state_of(rig.stage)
        look_before = rig.look()
        rig.timers.reset()
        with switch.generating(version=number + 1, step=number):
            looks["body"] = rig.look()
            generated = rig.generate(number)
        after = state_of(rig.stage)
        reports.append(
            {
                "before": look_before,
                **looks,
                "after": rig.look(),
                "same": before.keys() == after.keys()
                and all(torch.equal(before[name], after[name]) for name in before),
                "mismatch": rig.mismatch(generated),
                "phases": list(rig.timers.seconds()),
                "metrics": switch.metrics(),
            }
        )
        rig.learn(number + 1)
    rig.engine.close()
    return reports


class Trouble(Exception):
    """What the tests raise."""


class FailsOnce:
    """The real sets, but their first return ends in an error when one of them is back."""

    def __init__(self, sets: Any) -> None:
        self._sets = sets
        self._failed = False
        self.offload = sets.offload

    @property
    def offloaded(self) -> tuple[str, ...]:
        return self._sets.offloaded

    @property
    def freed_bytes(self) -> dict[str, int]:
        return self._sets.freed_bytes

    def onload(self, *names: str) -> Any:
        if self._failed:
            return self._sets.onload(*names)
        self._failed = True
        self._sets.onload(names[0])
        raise Trouble("no memory to come back to")


def _sync_raises(rig: Rig) -> None:
    def sync(step: int) -> None:
        rig.sync.run()
        raise Trouble("the sync fails")

    _use(rig.switch(sync), lambda: None)


def _body_raises(rig: Rig) -> None:
    def body() -> None:
        for _ in rig.begun():
            assert sum(
                rig.engine._llm.llm_engine.engine_core.engine_core.scheduler.get_request_counts()
            )
            raise Trouble("with requests still running")

    _use(rig.switch(), body)


def _body_is_interrupted(rig: Rig) -> None:
    def body() -> None:
        next(rig.begun())
        raise KeyboardInterrupt

    _use(rig.switch(), body)


def _body_leaves_requests_running(rig: Rig) -> None:
    """vLLM does not give blocks of its cache up that requests still use."""
    _use(rig.switch(), lambda: next(rig.begun()))


def _coming_back_fails(rig: Rig) -> None:
    _use(rig.switch(training=FailsOnce(rig.sets)), lambda: rig.generate(1))


def _parameters_cannot_leave(rig: Rig) -> None:
    """torch cannot give up memory that numpy owns.

    Half of the parameters have left by then."""
    parameters = parameters_of(rig.stage.actor.chunks)
    borrowed = parameters[len(parameters) // 2]
    original = borrowed.data
    borrowed.data = torch.from_numpy(np.zeros(original.shape, np.float32)).copy_(original)
    try:
        _use(rig.switch(), lambda: None)
    finally:
        borrowed.data = original


def _use(switch: MemorySwitch, body: Callable[[], Any]) -> None:
    """One cycle that fails; the error carries what the switch says afterwards."""
    try:
        with switch.generating(1, step=0):
            body()
    except BaseException as error:
        try:
            with switch.generating(2, step=1):
                raise AssertionError("a broken switch generates")
        except RuntimeError as refusal:
            error.add_note(f"{switch.broken}: {refusal}")
        raise


FAILURES = {
    "sync": _sync_raises,
    "body": _body_raises,
    "interrupt": _body_is_interrupted,
    "running": _body_leaves_requests_running,
    "coming back": _coming_back_fails,
    "leaving": _parameters_cannot_leave,
}


def failures(folder: Path, case: Case, engine_size: int) -> dict[str, dict[str, Any]]:
    """Reports after every failure.

    They say what is where, what has changed, and whether all goes on with another switch."""
    rig = Rig(folder, case, engine_size)
    reports = {}
    for name, fail in FAILURES.items():
        before = state_of(rig.stage)
        weights = whole_tensors(rig.stage)
        look_before = rig.look()
        report: dict[str, Any] = {"error": None}
        try:
            fail(rig)
        except BaseException as error:
            report = {"error": repr(error), "next": error.__notes__[-1]}
        after = state_of(rig.stage)
        exported = whole_tensors(rig.stage)
        reports[name] = report | {
            "before": look_before,
            "after": rig.look(),
            "same": all(torch.equal(before[key], after[key]) for key in before),
            "exported": all(torch.equal(weights[key], exported[key]) for key in weights),
        }
        rig.learn(1)
        with rig.switch().generating(7, step=6):
            generated = rig.generate(2)
        reports[name]["mismatch"] = rig.mismatch(generated)
    rig.engine.close()
    return reports
