"""What a trainer's engines are built from and told; the parts are stand-ins that keep it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.config.length_curriculum import length_stages
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import (
    Config,
    DataConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    SyncConfig,
    ValidationConfig,
)
from rlmath.data.dataset import Inputs
from rlmath.data.order import PromptOrder
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.offload import RESTING
from rlmath.rollout.engine_messages import End, NewWeights
from rlmath.trainer.context import RankContext
from rlmath.trainer.rollouts import engines

pytestmark = pytest.mark.usefixtures("process_group")

CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
SHAPE = ModelShape(
    "Qwen2ForCausalLM",
    2,
    64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=64,
    vocab_size=10,
    tied_embeddings=False,
    max_positions=64,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    attention_bias=True,
    torch_dtype="float32",
)
WORKERS: Any = object()
KEEP: Any = object()
TOKENIZER: Any = object()
STOPS = (1, 2)
NOTHING: Any = None
MESH = Mesh(0, 1, 1, pipeline=1, engine_size=1)
ACTOR: Any = SimpleNamespace(chunks=["chunk"], forward_backward="passes")


class Part:
    """A part that keeps what it was made from, by the names that the real one has."""

    def __init__(self, kind: type, arguments: dict[str, Any]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.events: list[Any] = []
        self.continues_noise = True
        self.memory = SimpleNamespace(
            sleep=lambda: self.events.append("sleep"), keeps_weights="as the engine does"
        )
        self.weights = "the engine's weights"
        self.bytes_sent = 3 * 2**29
        self.kept_metrics = {"sync/kept": 1.0}

    def close(self) -> None:
        self.events.append("close")

    def run(self, check: bool) -> Any:
        self.events.append(("run", check))
        return SimpleNamespace(metrics=lambda: {"sync/gib": 1.0})

    def score_policy(self, step: int) -> None:
        self.events.append(("score", step))

    def compare(self) -> dict[str, float]:
        self.events.append("compare")
        return {"sync/probe": 0.5}

    def generating(self, version: int, step: int) -> Any:
        self.events.append(("generate", version, step))
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {"memory/held": 2.0}

    def offer(self) -> float:
        self.events.append("offer")
        return 1.25

    def send(self, message: object) -> None:
        self.events.append(message)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * len(sequence) for sequence in sequences]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """The parts that were made, by name."""
    parts_by_name: dict[str, Part] = {}

    def stand_in(name: str) -> Any:
        kind = getattr(engines, name)

        def make(*positional: Any, **keywords: Any) -> Part:
            bound = inspect.signature(kind).bind(*positional, **keywords)
            bound.apply_defaults()
            parts_by_name[name] = Part(kind, bound.arguments)
            return parts_by_name[name]

        return make

    for name in (
        "Engine",
        "open_tools",
        "Collector",
        "WeightTransfer",
        "Probe",
        "MemorySwitch",
        "MemoryMonitor",
        "Mailbox",
        "EngineConnection",
        "WeightSender",
        "WholeRollouts",
        "PartialRollouts",
        "AsynchronousRollouts",
    ):
        monkeypatch.setattr(engines, name, stand_in(name))
    return parts_by_name


def context_of(config: Config, mesh: Mesh = MESH, **changes: Any) -> RankContext[Inputs]:
    inputs = Inputs(
        [],
        PromptOrder(4, 2, seed=1, shuffle=False),
        total_steps=2,
        reports=(),
        history={},
        history_line="",
        tokenizer=TOKENIZER,
        stop_token_ids=STOPS,
    )
    shapes: Any = SimpleNamespace(policy=SHAPE, length_stages=tuple(length_stages(config, 2)))
    return RankContext(config, shapes, inputs, mesh=mesh, device=CPU, workers=WORKERS, **changes)


CONFIG = Config(
    model=ModelConfig(path="m"),
    data=DataConfig(max_prompt_tokens=20),
    rollout=RolloutConfig(max_new_tokens=30),
    sync=SyncConfig(checksum_every=2, bucket_mib=3.0),
    validation=ValidationConfig(every_steps=1, paths=["v.jsonl"], max_new_tokens=90),
    lora=LoraConfig(rank=2, engine="adapters"),
    memory=MemoryConfig(leak_threshold_mib=0.5),
)


def colocated(config: Config, **changes: Any) -> engines.ColocatedEngines:
    opened = engines.open_engines(context_of(config, **changes), PhaseTimers(), KEEP)
    assert isinstance(opened, engines.ColocatedEngines)
    return opened


def test_an_engine_in_the_training_ranks_is_built_for_the_policy_and_sleeps(
    parts: dict[str, Part],
) -> None:
    """It has room for the longest completion, that of a validation, and holds the adapters."""
    on_progress: Any = object()
    opened = colocated(CONFIG, on_progress=on_progress)
    engine = parts["Engine"]
    engine_arguments = engine.arguments
    assert engine_arguments["max_sequence"] == 20 + 90
    assert engine_arguments["stop_token_ids"] == STOPS
    assert any("lora" in name for name in engine_arguments["weight_shapes"])
    assert engine_arguments["keeps_weights"] and not engine_arguments["records_routes"]
    assert engine.events == ["sleep"] and engine.on_step is on_progress  # type: ignore[attr-defined]
    assert engine.tools is parts["open_tools"]  # type: ignore[attr-defined]
    assert parts["open_tools"].arguments["stop_token_ids"] == STOPS
    assert parts["open_tools"].arguments["continues_noise"] is True
    collector = parts["Collector"].arguments
    assert (collector["pool"], collector["scorer"], collector["has_scorer"]) == (
        WORKERS,
        None,
        False,
    )
    assert (collector["rollout"], collector["reward"]) == (CONFIG.rollout, CONFIG.reward)
    assert collector["routes"] is opened.routes is None
    rollouts = parts["WholeRollouts"]
    assert opened.rollouts is rollouts and rollouts.arguments["keep"] is KEEP  # type: ignore[comparison-overlap]
    assert rollouts.arguments["engines"] is opened.collector is parts["Collector"]  # type: ignore[comparison-overlap]


def test_an_engine_holds_no_adapters_where_these_are_merged_or_nothing_has_any(
    parts: dict[str, Part],
) -> None:
    for lora in (LoraConfig(), LoraConfig(rank=2, engine="merged")):
        opened = colocated(replace(CONFIG, lora=lora))
        engine_arguments = parts["Engine"].arguments
        assert not any("lora" in name for name in engine_arguments["weight_shapes"])
        assert not engine_arguments["keeps_weights"]
        opened.connect(ACTOR, NOTHING)
        assert not parts["Probe"].arguments["holds_adapters"]


def test_an_engine_records_routes_on_its_first_rank_where_they_are_replayed(
    parts: dict[str, Part],
) -> None:
    config = replace(CONFIG, policy=PolicyConfig(routing_replay="engine"))
    opened = colocated(config)
    assert parts["Engine"].arguments["records_routes"] and opened.routes is not None
    assert parts["Collector"].arguments["routes"] is opened.routes
    opened.connect(ACTOR, NOTHING)
    kept_bytes = parts["MemorySwitch"].arguments["kept_bytes"]
    assert kept_bytes() == 0
    opened.routes.keep(torch.zeros(3, 2, 2, dtype=torch.uint8))
    assert kept_bytes() == 12
    colocated(config, mesh=Mesh(1, 2, tensor=2, pipeline=1, engine_size=2))
    assert not parts["Engine"].arguments["records_routes"]


@pytest.mark.parametrize("tail", ["carry", "defer"])
def test_completions_are_carried_by_an_engine_whose_noise_goes_on(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch, tail: Any
) -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, tail=tail))
    colocated(config)
    assert "WholeRollouts" not in parts and parts["PartialRollouts"].arguments["keep"] is KEEP
    make = engines.Engine

    def without(*positional: Any, **keywords: Any) -> Any:
        engine: Any = make(*positional, **keywords)
        engine.continues_noise = False
        return engine

    monkeypatch.setattr(engines, "Engine", without)
    if tail == "defer":
        colocated(config)
        return
    with pytest.raises(ValueError, match="whose noise begins anew in every slice"):
        colocated(config)


def test_the_weights_come_to_the_engine_in_the_training_ranks_at_their_step(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums are due in every other step; the probe has a sequence of the training's length."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    opened = colocated(CONFIG)
    opened.connect(ACTOR, NOTHING)
    transfer = parts["WeightTransfer"]
    transfer_arguments = transfer.arguments
    assert transfer_arguments["weights"] == "the engine's weights"
    assert transfer_arguments["lora"] == CONFIG.lora
    assert transfer_arguments["keeps_weights"] == "as the engine does"
    assert transfer_arguments["bucket_bytes"] == 3 * 2**20
    assert transfer_arguments["ranks_per_node"] == 3
    probe = parts["Probe"]
    assert probe.arguments["longest"] == 20 + 30 and probe.arguments["holds_adapters"]
    assert probe.arguments["engine_scores"]([[1, 2]]) == {0: [[-1.0, -1.0]]}
    switch = parts["MemorySwitch"]
    with opened.generating(8, 3):
        assert switch.events == [("generate", 8, 3)]
    for step, checks in ((2, True), (3, False)):
        switch.arguments["sync"](step)
        assert transfer.events[-1] == ("run", checks) and probe.events[-1] == ("score", step)
    assert opened.probe() == {"sync/probe": 0.5} and probe.events[-1] == "compare"
    assert opened.metrics() == {"sync/gib": 1.0, "memory/held": 2.0}
    opened.close(0)
    assert parts["Engine"].events[-1] == parts["open_tools"].events[-1] == "close"


def test_each_engine_answers_by_its_first_rank(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of two ranks: the answers of ranks 0 and 2 count."""
    opened = colocated(CONFIG, mesh=Mesh(0, 4, tensor=4, pipeline=1, engine_size=2))
    opened.connect(ACTOR, NOTHING)
    monkeypatch.setattr(engines, "all_gather_objects", lambda scores: ["a", "b", "c", "d"])
    assert parts["Probe"].arguments["engine_scores"]([[1]]) == {0: "a", 1: "c"}


@pytest.mark.parametrize(("stops", "every"), [(False, engines.CPU_COMPARES_EVERY), (True, 1)])
def test_memory_is_compared_in_every_cycle_where_a_leak_ends_the_run(
    parts: dict[str, Part], stops: bool, every: int
) -> None:
    memory = replace(CONFIG.memory, stop_on_leak=stops)
    mesh = Mesh(1, 2, 2, pipeline=1, engine_size=1)
    colocated(replace(CONFIG, memory=memory), mesh=mesh).connect(ACTOR, NOTHING)
    assert parts["MemoryMonitor"].arguments == {
        "threshold_bytes": 2**19,
        "stop": stops,
        "rank": 1,
        "every": every,
    }


def test_engines_keep_their_weights_where_all_ranks_have_room_for_them(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "all_gather_objects", lambda keeps: [keeps, False])
    colocated(CONFIG)
    assert not parts["Engine"].arguments["keeps_weights"]


def test_engines_close_what_scores_validations(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    scorer: Any = SimpleNamespace(close=lambda: closed.append("scorer"))
    monkeypatch.setattr(engines, "open_scorer", lambda hook, reward: scorer)
    validation = replace(CONFIG.validation, scorer="math:isnan")
    opened = colocated(replace(CONFIG, validation=validation))
    collector = parts["Collector"].arguments
    assert collector["scorer"] is scorer and collector["has_scorer"]
    opened.close(0)
    assert closed == ["scorer"]


def test_an_engine_without_tools_is_closed_alone(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "open_tools", lambda *positional, **keywords: None)
    opened = colocated(CONFIG)
    opened.close(0)
    assert parts["Engine"].events[-1] == "close"


def test_engines_on_ranks_of_their_own_are_offered_the_weights_and_told_of_them(
    parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four training ranks, and two engines of two ranks."""
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, ranks=4))
    bridge: Any = SimpleNamespace(training_ranks=4, world_size=8)
    mesh = Mesh(0, 4, tensor=2, pipeline=1, engine_size=2, engine_ranks=4)
    on_progress: Any = object()
    timers = PhaseTimers()
    context = context_of(config, mesh, bridge=bridge, on_progress=on_progress)
    opened = engines.open_engines(context, timers, KEEP)
    assert parts["AsynchronousRollouts"].arguments["keep"] is KEEP
    assert list(parts["Mailbox"].arguments["partners"]) == [4, 6]
    connection = parts["EngineConnection"]
    assert connection.arguments["mailbox"] is parts["Mailbox"]
    assert connection.arguments["on_progress"] is on_progress
    assert opened.collector is connection  # type: ignore[comparison-overlap]
    offloaded: list[tuple[str, ...]] = []
    offload: Any = SimpleNamespace(offload=lambda *names: offloaded.append(names))
    opened.connect(ACTOR, offload)
    assert offloaded == [RESTING]
    sender = parts["WeightSender"]
    assert sender.arguments["lora"] == config.lora and sender.arguments["dtype"] is torch.float32
    assert sender.arguments["mailbox"] is parts["Mailbox"]
    probe = parts["Probe"]
    assert probe.arguments["longest"] == 20 + 30 and probe.arguments["holds_adapters"]
    with monkeypatch.context() as clock:
        clock.setattr(engines.time, "monotonic", lambda: 12.5)
        with opened.generating(8, 3):
            (message,) = connection.events
            assert message == NewWeights(8, 3, 12.5)
            assert sender.events == ["offer"] and "sync" in timers.seconds()
            assert opened.probe() == {"sync/probe": 0.5}
    assert probe.events == [("score", 3), "compare"]
    assert opened.metrics() == {
        "sync/sent_gib": 1.5,
        "seconds/sync_wait_for_engines": 1.25,
        "sync/kept": 1.0,
    }
    opened.close(4)
    assert connection.events[-1] == End(4)
    assert parts["Mailbox"].events == ["close"] and sender.events[-1] == "close"
