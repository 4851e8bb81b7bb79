"""The engines as the trainer sees them, in the training ranks or on ranks of their own.

In the training ranks they take turns with training on the same memory; `rollout.ranks` decides.

    engines = open_engines(...)                   # before the models: it measures free memory
    engines.connect(actor, offload)
    with engines.generating(version, step):       # they have the policy's weights of that version
        engines.probe(); validation; engines.rollouts.step(...)
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import ClassVar

from rlmath.config import length_curriculum
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.dataset import Inputs
from rlmath.distributed.bridge import Bridge, Mailbox
from rlmath.distributed.collectives import all_gather_objects, broadcast_from_rank_zero
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.ranks import local_world_size
from rlmath.models.build import Actor
from rlmath.models.offload import RESTING, OffloadSets
from rlmath.planning.memory_fit import cpu_target, keeps_base, planned_target
from rlmath.rewards.reward_manager import RewardWorkers, open_reward_workers, open_scorer
from rlmath.rewards.several_rewards import MeasuredRows
from rlmath.rollout.collector import Collector
from rlmath.rollout.engine import Engine
from rlmath.rollout.engine_messages import End, NewWeights
from rlmath.rollout.engine_tools import open_tools
from rlmath.rollout.engine_turns import open_turns, turn_prompts
from rlmath.rollout.memory_monitor import MemoryMonitor
from rlmath.rollout.memory_switch import CPU_COMPARES_EVERY, MemorySwitch
from rlmath.rollout.routes import RouteStore
from rlmath.rollout.weight_sync.logprob_probe import Probe, is_due
from rlmath.rollout.weight_sync.offer import OfferPlans, WeightSender
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes, plan_sync
from rlmath.rollout.weight_sync.shard_layouts import (
    engine_adapters,
    engine_shapes,
    training_layout,
)
from rlmath.rollout.weight_sync.weight_sync import (
    SyncReport,
    WeightTransfer,
    learning_parameters,
)
from rlmath.trainer.context import RankContext
from rlmath.trainer.rollouts.asynchronous import AsynchronousRollouts, EngineConnection
from rlmath.trainer.rollouts.synchronous import Keep, PartialRollouts, StepRollouts, WholeRollouts
from rlmath.trainer.validation import GroupCollector
from rlmath.workers.user_functions import UserFunctionError, scorer_hook

logger = logging.getLogger(__name__)


class Engines(ABC):
    """All training ranks call its methods alike."""

    collector: GroupCollector
    rollouts: StepRollouts
    phase: ClassVar[str]
    """Name of a step's time for rollouts: "rollout", or "wait_for_groups" where it only waits."""
    routes: RouteStore | None = None
    """Experts of what this rank's engine has sampled in the step; None: they are not recorded."""

    def __init__(self, context: RankContext[Inputs], timers: PhaseTimers) -> None:
        self._config = context.config
        self._shape = context.shapes.policy
        self._mesh = context.mesh
        self._device = context.device
        self._timers = timers

    @abstractmethod
    def connect(self, actor: Actor, offload: OffloadSets) -> None:
        """Set where the weights come from; called once."""

    @contextmanager
    def generating(self, version: int, step: int) -> Iterator[None]:
        """Let the engines generate for step `step` (from 0) with the policy's weights of `version`.

        The error of a user's function that fails inside is raised when the engines have left their
        phase."""
        failure = None
        with self._generating(version, step):
            try:
                yield
            except UserFunctionError as error:
                failure = error
        if failure is not None:
            raise failure

    @abstractmethod
    def _generating(self, version: int, step: int) -> AbstractContextManager[None]:
        """The engines' phase."""

    @abstractmethod
    def probe(self) -> dict[str, float]:
        """Compare both sides' log-probs, where that is due; returns metrics.

        Called inside of `generating`. RuntimeError on all ranks where they differ too much."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Metrics of the last `generating`, on this rank."""

    @abstractmethod
    def close(self, status: int) -> None:
        """End the engines; the run ends with this exit status."""


def open_engine_workers(
    config: Config,
    mesh: Mesh,
    measured: MeasuredRows = MeasuredRows(),  # noqa: B008
) -> AbstractContextManager[RewardWorkers | None]:
    """The reward workers of an engine's first rank.

    Open them before process groups and engines."""
    if not mesh.is_engine_leader:
        return nullcontext()
    return open_reward_workers(config.reward, config.run.plugins, measured)


def open_engines(
    context: RankContext[Inputs], timers: PhaseTimers, keep: Keep | None = None
) -> Engines:
    """The engines that `rollout.ranks` asks for.

    The context's bridge leads to engines on ranks of their own; otherwise its workers score
    completions. `keep` is a function of the user's that selects groups."""
    if context.bridge is None:
        return ColocatedEngines(context, timers, keep)
    return SeparateEngines(context, context.bridge, timers, keep=keep)


class ColocatedEngines(Engines):
    """One engine in `mesh.engine_size` training ranks each; it sleeps while they train."""

    phase = "rollout"

    def __init__(
        self, context: RankContext[Inputs], timers: PhaseTimers, keep: Keep | None
    ) -> None:
        """Build the engine; it sleeps afterwards."""
        super().__init__(context, timers)
        config = context.config
        inputs = context.inputs
        mesh = context.mesh
        self._scorer = validation_scorer(config, mesh)
        shape = context.shapes.policy
        adapters = engine_adapters(shape, config.lora)
        keeps_weights = bool(adapters) and _keeps_weights(context)
        if config.policy.routing_replay == "engine":
            self.routes = RouteStore(mesh.rank)
        logger.info("Starting: importing vLLM, building the engine (seconds to minutes) ...")
        self.engine = Engine(
            config.model.path,
            config.rollout,
            max_sequence=length_curriculum.engine_length(config),
            mesh=mesh,
            device=context.device,
            weight_shapes=engine_shapes(shape, mesh.engine_size, adapters=adapters),
            stop_token_ids=inputs.stop_token_ids,
            keeps_weights=keeps_weights,
            records_routes=self.routes is not None and mesh.is_engine_leader,
        )
        if config.rollout.tail == "carry" and not self.engine.continues_noise:
            raise ValueError(
                'rollout.tail is "carry", and vLLM takes its first model runner (its log says '
                "why), whose noise begins "
                "anew in every slice of a completion. Set rollout.tail=wait"
            )
        self.engine.memory.sleep()
        self.engine.on_step = context.on_progress
        self._tools = open_tools(
            config.tools,
            inputs.tokenizer,
            mesh,
            continues_noise=self.engine.continues_noise,
            stop_token_ids=inputs.stop_token_ids,
        )
        self.engine.tools = self._tools
        self._turns = open_turns(
            config,
            inputs.tokenizer,
            mesh,
            turn_prompts(config, inputs.prompts, context.validation),
            continues_noise=self.engine.continues_noise,
            stop_token_ids=inputs.stop_token_ids,
        )
        self.collector = Collector(
            self.engine,
            mesh,
            tokenizer=inputs.tokenizer,
            rollout=config.rollout,
            reward=config.reward,
            pool=context.workers,
            scorer=self._scorer,
            has_scorer=scorer_hook(config) is not None,
            routes=self.routes,
            turns=self._turns,
        )
        rollouts = WholeRollouts if config.rollout.tail == "wait" else PartialRollouts
        self.rollouts = rollouts(config, inputs, self.collector, shapes=context.shapes, keep=keep)

    def connect(self, actor: Actor, offload: OffloadSets) -> None:
        config = self._config
        mesh = self._mesh
        device = self._device
        self._transfer = WeightTransfer(
            actor.chunks,
            self._shape,
            layout=training_layout(self._shape.num_layers, mesh, config.parallel),
            mesh=mesh,
            device=device,
            weights=self.engine.weights,
            bucket_bytes=bucket_bytes(config.sync.bucket_mib, device.kind, mesh.world_size),
            ranks_per_node=broadcast_from_rank_zero(local_world_size()),
            lora=config.lora,
            keeps_weights=self.engine.memory.keeps_weights,
        )
        longest = probe_length(config)
        self._probe = Probe(
            actor.forward_backward,
            mesh,
            longest,
            settings=config.sync,
            engine_scores=self._engine_scores,
            holds_adapters=bool(engine_adapters(self._shape, config.lora)),
        )
        self._report: SyncReport | None = None
        monitor = MemoryMonitor(
            int(config.memory.leak_threshold_mib * 2**20),
            config.memory.stop_on_leak,
            mesh.rank,
            every=CPU_COMPARES_EVERY
            if device.kind == "cpu" and not config.memory.stop_on_leak
            else 1,
        )
        self.switch = MemorySwitch(
            self.engine,
            offload,
            sync=self._sync,
            monitor=monitor,
            timers=self._timers,
            device=device,
            kept_bytes=lambda: 0 if self.routes is None else self.routes.bytes,
        )

    def _generating(self, version: int, step: int) -> AbstractContextManager[None]:
        return self.switch.generating(version, step)

    def probe(self) -> dict[str, float]:
        return self._probe.compare()

    def metrics(self) -> dict[str, float]:
        assert self._report is not None
        return self._report.metrics() | self.switch.metrics()

    def _sync(self, step: int) -> None:
        """Write the weights that step `step` (from 0) samples with.

        With all steps done, they are those of the last validation. RuntimeError on all ranks where
        a checksum was due and differs."""
        self._report = self._transfer.run(check=is_due(self._config.sync.checksum_every, step))
        self._probe.score_policy(step)

    def _engine_scores(self, sequences: Sequence[Sequence[int]]) -> dict[int, list[list[float]]]:
        by_rank = all_gather_objects(self.engine.score(sequences))
        return {
            engine: by_rank[engine * self._mesh.engine_size]
            for engine in range(self._mesh.num_engines)
        }

    def close(self, status: int) -> None:
        self.engine.close()
        if self._tools is not None:
            self._tools.close()
        if self._turns is not None:
            self._turns.close()
        if self._scorer is not None:
            self._scorer.close()


class SeparateEngines(Engines):
    """Engines on ranks of their own, which go on while the training ranks train."""

    phase = "wait_for_groups"

    def __init__(
        self, context: RankContext[Inputs], bridge: Bridge, timers: PhaseTimers, keep: Keep | None
    ) -> None:
        super().__init__(context, timers)
        config = context.config
        inputs = context.inputs
        mesh = context.mesh
        self._bridge = bridge
        leaders = range(bridge.training_ranks, bridge.world_size, mesh.engine_size)
        self._mailbox = Mailbox(bridge, leaders)
        self._connection = EngineConnection(mesh, self._mailbox, context.on_progress)
        self.collector = self._connection
        self.rollouts = AsynchronousRollouts(
            config, inputs, self._connection, shapes=context.shapes, keep=keep
        )
        self._step = 0
        self._waited = 0.0

    def connect(self, actor: Actor, offload: OffloadSets) -> None:
        self._sender = WeightSender(
            actor.chunks,
            self._shape,
            plans=offer_plans(self._config, self._shape, self._mesh, device=self._device),
            mesh=self._mesh,
            device=self._device,
            dtype=self._device.params_dtype,
            bridge=self._bridge,
            mailbox=self._mailbox,
            lora=self._config.lora,
        )
        longest = probe_length(self._config)
        self._probe = Probe(
            actor.forward_backward,
            self._mesh,
            longest,
            settings=self._config.sync,
            engine_scores=self._connection.score,
            holds_adapters=bool(engine_adapters(self._shape, self._config.lora)),
        )
        offload.offload(*RESTING)

    @contextmanager
    def _generating(self, version: int, step: int) -> Iterator[None]:
        """Offer the weights, which the engines take when they can.

        The trainers do not wait for that, but for the version before."""
        self._step = step
        learned_at = time.monotonic()
        with self._timers.phase("sync"):
            self._waited = self._sender.offer()
        self._connection.send(NewWeights(version, step, learned_at))
        yield

    def probe(self) -> dict[str, float]:
        self._probe.score_policy(self._step)
        return self._probe.compare()

    def metrics(self) -> dict[str, float]:
        return {
            "sync/sent_gib": self._sender.bytes_sent / 2**30,
            "seconds/sync_wait_for_engines": self._waited,
        } | self._sender.kept_metrics

    def close(self, status: int) -> None:
        self._connection.send(End(status))
        self._mailbox.close()
        self._sender.close()


# --------------------------------------------------------- what both sides derive from the settings


def _keeps_weights(context: RankContext[Inputs]) -> bool:
    """Whether engines keep the weights that do not learn, the same on all ranks.

    A collective."""
    config = context.config
    if context.device.kind == "cpu":
        target = cpu_target(config.policy)
    else:
        target = planned_target(config.memory, config.policy, config.run.device)
    keeps = keeps_base(config, context.shapes, context.mesh.world_size, target=target)
    return all(all_gather_objects(keeps))


def validation_scorer(config: Config, mesh: Mesh) -> RewardWorkers | None:
    """The workers of `validation.scorer`, on every engine's first rank in a run that validates."""
    hook = (
        scorer_hook(config)
        if length_curriculum.validates(config) and mesh.is_engine_leader
        else None
    )
    return None if hook is None else open_scorer(hook, config.reward)


def offer_plans(config: Config, shape: ModelShape, mesh: Mesh, device: Device) -> OfferPlans:
    """The plans by which weights come to the first engine on ranks of its own.

    They come from the training ranks, those of `mesh`."""
    buckets = bucket_bytes(config.sync.bucket_mib, device.kind, mesh.world_size + mesh.engine_ranks)
    layout = training_layout(shape.num_layers, mesh, config.parallel)
    plan = partial(
        plan_sync,
        shape,
        layout,
        mesh,
        element_bytes=device.params_dtype.itemsize,
        bucket_bytes=buckets,
        adapters=engine_adapters(shape, config.lora),
    )
    whole = plan()
    if config.lora.rank == 0:
        return OfferPlans(first=whole, later=whole)
    return OfferPlans(first=whole, later=plan(only=learning_parameters(shape, config.lora)))


def probe_length(config: Config) -> int:
    """Most tokens of a probe's sequence: those of the first length stage, without validation.

    So they are the same in all length stages and with any validation."""
    first = length_curriculum.without_validation(
        length_curriculum.length_stages(config, None)[0].config
    )
    return length_curriculum.engine_length(first)
