"""An engine's part of the memory switch, and what the switch plans for a rank to hold.

A stand-in for vLLM writes down what it is asked to do. The whole of it, with a real engine, is in
tests/distributed/test_switch.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.config.schema import RolloutConfig
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.tensor_offload import OffloadStats, StorageSet
from rlmath.models.offload import OffloadSets, SetName
from rlmath.rollout.engine_sleep import EngineMemory
from rlmath.rollout.engine_weights import EngineWeights
from rlmath.rollout.memory_monitor import MemoryMonitor
from rlmath.rollout.memory_switch import MemorySwitch, planned_phases
from tests.rollout.scripted_vllm import CPU, scripted_engine, tokens_of


class RecordingLLM:
    """Stands for vLLM's `LLM`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.running = ["7", "8"]
        self.no_memory_for: list[str] | None = None
        cache = torch.zeros(3, 4)
        self.adapters = SimpleNamespace(_last_mapping="of the last batch")
        runner = SimpleNamespace(
            kv_caches=[[cache], cache[1:], torch.zeros(10)],
            lora_manager=SimpleNamespace(_adapter_manager=self.adapters),
        )
        self._worker = SimpleNamespace(model_runner=runner)
        executor = SimpleNamespace(discard=lambda tags: self.calls.append(f"executor {tags}"))
        core = SimpleNamespace(
            scheduler=SimpleNamespace(requests={"8": None}), model_executor=executor
        )
        self.llm_engine = SimpleNamespace(
            output_processor=SimpleNamespace(request_states={"7": None}),
            abort_request=self._abort,
            engine_core=SimpleNamespace(abort_requests=self._abort, engine_core=core),
        )

    def _abort(self, names: list[str], internal: bool = False) -> None:
        self.calls.append(f"abort {names}")
        self.running = [name for name in self.running if name not in names]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return not self.running

    def collective_rpc(
        self, method: str | Callable[[Any], Any], args: tuple[Any, ...] = ()
    ) -> list[Any]:
        if callable(method):
            return [method(self._worker)]
        self.calls.append(" ".join([method, *map(str, args)]))
        return [None]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        if tags == self.no_memory_for:
            raise MemoryError(tags)
        self.calls.append(f"wake {tags}")


class Rig:
    """The memory of a recording engine whose only weight is a matrix of 6 elements."""

    def __init__(self, device: str, busy: bool = False, keeps_weights: bool = False) -> None:
        self.llm = RecordingLLM()
        self.llm.running = self.llm.running if busy else []
        self.model = torch.nn.Linear(2, 3, bias=False)
        weights = EngineWeights(self.model, {"weight": (3, 2)})
        self.memory = EngineMemory(self.llm, weights, device, keeps_weights=keeps_weights)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight.untyped_storage().nbytes()


MOVES = ("sleep", "wake_weights", "wake_kv_cache")
CALLS = {
    "cuda": ["reset_prefix_cache", "sleep 2", "wake ['weights']", "wake ['kv_cache']"],
    "cpu": ["reset_prefix_cache", "release_kv_cache", "restore_kv_cache"],
}


@pytest.mark.parametrize("device", CALLS)
def test_cycles_in_the_right_order(device: str) -> None:
    rig = Rig(device)
    states = [rig.memory.state]
    weight_bytes = []
    for move in 2 * MOVES:
        getattr(rig.memory, move)()
        states.append(rig.memory.state)
        weight_bytes.append(rig.weight_bytes)
    assert states == ["awake", *2 * ["asleep", "weights", "awake"]]
    assert rig.llm.calls == 2 * CALLS[device]
    # On GPU it is vLLM itself that gives the weights up.
    assert weight_bytes == 2 * ([0, 24, 24] if device == "cpu" else [24, 24, 24])


@pytest.mark.parametrize(
    ("device", "calls"),
    [
        ("cuda", ["reset_prefix_cache", "executor ('kv_cache',)", "wake ['kv_cache']"]),
        ("cpu", ["reset_prefix_cache", "release_kv_cache", "restore_kv_cache"]),
    ],
)
def test_weights_that_stay_neither_leave_nor_wake(device: str, calls: list[str]) -> None:
    rig = Rig(device, keeps_weights=True)
    for move in 2 * MOVES:
        getattr(rig.memory, move)()
        assert rig.weight_bytes == 24
    assert rig.llm.calls == 2 * calls and rig.memory.waking_bytes == 0
    assert rig.llm.adapters._last_mapping == "of the last batch"


def test_weights_that_left_take_with_them_which_tokens_have_adapters() -> None:
    rig = Rig("cuda")
    rig.memory.sleep()
    rig.memory.wake_weights()
    assert rig.llm.adapters._last_mapping is None


def test_the_kv_cache_is_what_its_storages_hold_together() -> None:
    """Layers that share memory count once: 12 and 10 elements of 4 bytes."""
    assert Rig("cpu").memory.kv_cache_bytes == 88


@pytest.mark.parametrize("device", CALLS)
def test_a_cache_that_is_still_in_use_is_an_error(device: str) -> None:
    rig = Rig(device, busy=True)
    with pytest.raises(RuntimeError, match="prefixes of old weights"):
        rig.memory.sleep()
    assert rig.memory.state == "awake" and rig.weight_bytes == 24
    assert rig.llm.calls == ["reset_prefix_cache"]


@pytest.mark.parametrize("device", CALLS)
@pytest.mark.parametrize("before", range(4))
def test_a_forced_sleep_ends_asleep_from_every_state(device: str, before: int) -> None:
    """No memory is taken for it: that may be what failed."""
    rig = Rig(device)
    for move in MOVES[:before]:
        getattr(rig.memory, move)()
    state, rig.llm.calls = rig.memory.state, []
    rig.memory.force_sleep()
    aborted_and_asleep = ["abort ['7']", "abort ['8']", *CALLS[device][:2]]
    assert rig.memory.state == "asleep"
    assert rig.llm.calls == {
        "awake": aborted_and_asleep,
        "weights": ["sleep 2"] if device == "cuda" else ["release_kv_cache"],
        "asleep": [],
    }.get(state)
    if device == "cpu":
        assert rig.weight_bytes == 0


@pytest.mark.parametrize(
    ("tag", "keeps_weights", "call"),
    [
        ("kv_cache", False, "sleep 2"),
        ("kv_cache", True, "discard ('kv_cache',)"),
        ("weights", False, "discard ('weights', 'kv_cache')"),
    ],
)
def test_a_forced_sleep_after_a_gpu_without_memory_ends_asleep(
    tag: str, keeps_weights: bool, call: str
) -> None:
    """A cache that found memory for a part of it alone gives that back, too."""
    rig = Rig("cuda", keeps_weights=keeps_weights)
    rig.llm.no_memory_for = [tag]
    rig.memory.sleep()
    if tag == "kv_cache":
        rig.memory.wake_weights()
    with pytest.raises(MemoryError):
        (rig.memory.wake_kv_cache if tag == "kv_cache" else rig.memory.wake_weights)()
    rig.memory.force_sleep()
    assert rig.memory.state == "asleep" and rig.llm.calls[-1] == call


def test_what_a_rank_holds_in_each_phase_by_hand() -> None:
    """40 of gradients, 80 of the optimizer, 20 of parameters and 20 of the reference leave.

    21 of engine weights and a KV cache of 60 come."""
    training = {"gradients": 40, "optimizer": 80, "parameters": 20, "reference": 20}
    assert planned_phases(training, weights=21, kv_cache=60) == {
        "offload": -140,
        "wake": -119,
        "sync": -119,
        "wake_kv_cache": -79,
        "generate": -79,
        "sleep": -160,
        "restore": 0,
    }


class SwitchRig:
    """A switch between the parameters and gradients of 4 numbers each, and an engine that sleeps."""

    def __init__(self, patch: pytest.MonkeyPatch, sync: Callable[[int], None]) -> None:
        self.engine, _ = scripted_engine(
            patch,
            lambda seed: tokens_of(""),
            Mesh(0, 1, 1, 1, engine_size=1),
            settings=RolloutConfig(),
            shapes={"norm.weight": (3, 1)},
        )
        self.engine.memory.sleep()
        self.parameters = torch.arange(4.0)
        self.gradients = torch.zeros(4)
        self.sets = OffloadSets(
            [
                StorageSet("parameters", lambda: [self.parameters], keep=True, device=CPU),
                StorageSet("gradients", lambda: [self.gradients], keep=False, device=CPU),
            ]
        )
        self.switch = MemorySwitch(
            self.engine,
            self.sets,
            sync,
            monitor=MemoryMonitor(2**40, stop=True, rank=0),
            timers=PhaseTimers(),
            device=CPU,
            kept_bytes=lambda: self.kept_bytes,
        )
        self.kept_bytes = 0

    def check_trains(self) -> None:
        """Training has its memory and its values; the engine has none."""
        assert self.engine.memory.state == "asleep" and self.sets.offloaded == ()
        assert self.parameters.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert self.gradients.tolist() == [0.0] * 4


@pytest.mark.usefixtures("process_group")
def test_memory_goes_to_the_engine_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    rig = SwitchRig(monkeypatch, synced.append)
    for version, step in ((8, 2), (9, 3)):
        with rig.switch.generating(version, step):
            assert rig.engine.memory.state == "awake" and rig.engine.version == version
            assert set(rig.sets.offloaded) == {"parameters", "gradients"}
        rig.check_trains()
    assert synced == [2, 3] and not rig.switch.broken


@pytest.mark.usefixtures("process_group")
def test_what_is_kept_of_the_samples_counts_in_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = SwitchRig(monkeypatch, lambda step: None)
    with rig.switch.generating(8, 2):
        rig.kept_bytes = 2**50
    held = rig.switch.metrics()
    assert held["memory/after_wake_gib"] > 0
    assert max(held[f"memory/after_{phase}_gib"] for phase in ("generate", "sleep", "restore")) < 0
    metrics = rig.switch.metrics()
    phases = ("offload", "wake", "sync", "wake_kv_cache", "generate", "sleep", "restore")
    assert [name for name in metrics if name.startswith("memory/after_")] == [
        f"memory/after_{phase}_gib" for phase in phases
    ]
    for name in rig.sets.names:
        assert metrics[f"memory/offloaded/{name}_gib"] == 16 / 2**30
        assert metrics[f"seconds/offload/{name}"] > 0


@pytest.mark.usefixtures("process_group")
def test_the_time_of_a_set_is_that_of_both_its_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = SwitchRig(monkeypatch, lambda step: None)
    moves: list[OffloadStats] = []
    for name in ("offload", "onload"):
        move = getattr(rig.sets, name)

        def recorded(
            *names: SetName, move: Callable[..., list[OffloadStats]] = move
        ) -> list[OffloadStats]:
            moved = move(*names)
            moves.extend(moved)
            return moved

        monkeypatch.setattr(rig.sets, name, recorded)
    with rig.switch.generating(version=8, step=2):
        pass
    for name in rig.sets.names:
        there, back = (moved.seconds for moved in moves if moved.name == name)
        assert rig.switch.metrics()[f"seconds/offload/{name}"] == there + back


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("failing", ["sync", "generate"])
def test_after_a_failure_the_engine_sleeps_and_what_is_trained_can_be_saved(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The switch does not generate again: other ranks may have gone on."""

    def sync(step: int) -> None:
        if failing == "sync":
            raise ValueError("sync")

    rig = SwitchRig(monkeypatch, sync)
    with pytest.raises(ValueError, match=failing), rig.switch.generating(8, 2):
        raise ValueError("generate")
    rig.check_trains()
    with pytest.raises(RuntimeError, match="broken"), rig.switch.generating(9, 3):
        pass
