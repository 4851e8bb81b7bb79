"""The models of a GRPO run on this rank, and its update from scored groups, without any engine.

    advantages -> samples -> schedule -> packing -> log-probs (old, reference) -> critic -> teacher
    -> minibatches: loss, early stop, update

`grpo` puts the rollout before it; `replay` makes a captured step's update again. The formulas are
in `algorithms/`, the loss of a minibatch in `models/learner.py`, the schedule in
`data/micro_batches.py`.
"""

# Shape legend: P prompts, G completions of a prompt.

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlmath.algorithms.advantages import advantages, gdpo_advantages
from rlmath.algorithms.entropy import EntropyControl
from rlmath.algorithms.losses import Normalisation
from rlmath.algorithms.types import Sample, ScoredGroup
from rlmath.checkpoint.directory import CRITIC, REFERENCE, Progress
from rlmath.checkpoint.hf.config_json import critic_config_file
from rlmath.checkpoint.hf.weights import load_hf_weights
from rlmath.checkpoint.sharded_state import SavedModel
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.dataset import Inputs, most_critic_updates, most_updates
from rlmath.data.micro_batches import plan_minibatches, training_cost
from rlmath.data.order import Rollback
from rlmath.data.packing import MicroBatch, pack
from rlmath.data.routes import expert_dtype, routes_needed, with_routes
from rlmath.distributed.collectives import reduce_over_ranks
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.build import (
    Actor,
    build_actor,
    build_critic,
    build_reference,
    build_teacher,
    copy_weights,
    token_rules,
)
from rlmath.models.critic import Critic
from rlmath.models.forward_backward import ForwardBackward
from rlmath.models.learner import MinibatchResult
from rlmath.models.offload import OffloadSets, SetName, training_sets
from rlmath.models.teacher import Teacher, TeacherStates
from rlmath.rewards.several_rewards import named_rewards, summed_rewards
from rlmath.rollout.routes import RouteStore, fetch_routes
from rlmath.telemetry.events import event
from rlmath.trainer.base import Trainer
from rlmath.trainer.context import RankContext
from rlmath.trainer.critic import CriticInAdvantages
from rlmath.trainer.metrics import Mismatch, UpdateRecord
from rlmath.trainer.token_advantages import (
    AdvantagePart,
    Advantages,
    KLInReward,
    PackedStep,
    ScoredStep,
    StepLogprobs,
    TeacherInAdvantages,
    TokensThatCount,
)
from rlmath.trainer.void_turns import VoidRule, learned_tokens, void_rule_of

logger = logging.getLogger(__name__)


class PolicyTrainer(Trainer):
    """The models of a GRPO run, and what a checkpoint has of them.

    A subclass has the step."""

    kind: ClassVar = "grpo"

    def build_models(self, context: RankContext[Inputs]) -> None:
        """Build actor, reference, critic and teacher, as set, and an updater per length stage."""
        config = context.config
        shapes = context.shapes
        shape = context.shapes.policy
        mesh = self.mesh
        device = self.device
        total_steps = context.inputs.total_steps
        stops = context.inputs.stop_token_ids
        self.actor = build_actor(
            config,
            shape,
            mesh=mesh,
            device=device,
            total_updates=most_updates(config, total_steps),
            stop_token_ids=stops,
        )
        self.actor.forward_backward.on_microbatch = context.on_progress
        self.reference = None
        if config.algorithm.kl_coef > 0:
            self.reference = build_reference(
                config, shape, mesh, device=device, stop_token_ids=stops, actor=self.actor
            )
        self.reference_moved = False
        """Whether the reference is another than the model that the run started from."""
        self.critic = None
        if shapes.critic is not None:
            updates = most_critic_updates(config, total_steps)
            self.critic = build_critic(
                config, shapes.critic, mesh, device=device, total_updates=updates
            )
            self.critic.forward_backward.on_microbatch = context.on_progress
            folder = Path(config.critic.path or config.model.path)
            self.critic_config = critic_config_file(folder, shapes.critic)
        self.teacher = None
        if shapes.teacher is not None:
            self.teacher = build_teacher(
                config,
                shape,
                teacher_shape=shapes.teacher,
                mesh=mesh,
                device=device,
                stop_token_ids=stops,
            )
            self.teacher.forward_backward.on_microbatch = context.on_progress
        in_update = config.teacher.loss == "full"
        self.offload = training_sets(
            self.actor,
            self.reference,
            settings=config.memory,
            device=device,
            critic=self.critic,
            teacher=self.teacher,
            teacher_in_update=in_update,
        )
        self.entropy = EntropyControl(config.algorithm.entropy_coef, config.algorithm.entropy_coef)
        self.updaters = [
            PolicyUpdater(
                stage.config,
                shape,
                mesh=mesh,
                actor=self.actor,
                reference=self.reference,
                offload=self.offload,
                timers=self.timers,
                critic=self.critic,
                teacher=self.teacher,
            )
            for stage in shapes.length_stages
        ]

    def move_reference(self, steps_done: int) -> None:
        """Make the policy the reference, where that is due after so many steps."""
        every = self.config.algorithm.reference_every_steps
        if self.reference is None or every is None or steps_done % every:
            return
        with self.offload.on_device("reference"):
            copy_weights(self.actor.chunks, self.reference.chunks)
        self.reference_moved = True
        logger.info("The reference is the policy of step %d from here on", steps_done)

    def control_entropy(self, update: UpdateRecord) -> dict[str, float]:
        """Set the weight of the entropy in the next step's loss, where there is a target.

        Returns the metric of the weight that this step used."""
        algorithm = self.config.algorithm
        results = [result for result in update.results if result.discarded is None]
        if algorithm.entropy_target is None:
            return {}
        used = self.entropy.weight
        if results:
            sums = [sum(result.sums[name] for result in results) for name in ("entropy", "tokens")]
            self.entropy = self.entropy.after(
                sums[0] / max(1.0, sums[1]), algorithm.entropy_target, algorithm.entropy_delta
            )
            self.use_entropy(self.entropy)
        return {"train/entropy_coef": used}

    def use_entropy(self, control: EntropyControl) -> None:
        """Learn with this weight of the entropy."""
        self.entropy = control
        learner = self.actor.learner
        learner.settings = replace(learner.settings, entropy_coef=control.weight)

    @property
    def models(self) -> list[SavedModel]:
        models = super().models
        if self.critic is not None:
            models.append(SavedModel(CRITIC, self.critic.chunks, self.critic.learner.optimizer))
        if self.reference is not None:
            models.append(SavedModel(REFERENCE, self.reference.chunks, None))
        return models

    def saved_models(self) -> list[SavedModel]:
        return [model for model in self.models if model.name != REFERENCE or self.reference_moved]

    def models_on_device(self, models: Sequence[SavedModel]) -> AbstractContextManager[Any]:
        names = {model.name for model in models}
        sets: tuple[SetName, ...] = ("critic", "reference")
        return self.offload.on_device(*(name for name in sets if name in names))

    def complete_progress(self, progress: Progress) -> Progress:
        if self.critic is not None:
            learner = self.critic.learner
            progress = replace(
                progress,
                critic_updates=learner.updates,
                critic_loss_scale=learner.loss_scale_state,
            )
        if self.config.algorithm.entropy_target is not None:
            progress = replace(progress, entropy=(self.entropy.coef, self.entropy.weight))
        return progress

    def resume(self, folder: Path, progress: Progress) -> None:
        if self.critic is not None:
            self.critic.learner.restore_schedule(
                progress.critic_updates, progress.critic_loss_scale
            )
        if self.reference is not None:
            if self.reference_moved and not progress.has_model(REFERENCE):  # after a rollback
                with self.offload.on_device("reference"):
                    load_hf_weights(
                        self.reference.chunks, self.config.model.path, self.shape, mesh=self.mesh
                    )
            self.reference_moved = progress.has_model(REFERENCE)
        if self.config.algorithm.entropy_target is not None and progress.entropy:
            self.use_entropy(EntropyControl(*progress.entropy))

    def roll_back(self, rollbacks: Sequence[Rollback]) -> None:
        super().roll_back(rollbacks)
        if self.critic is not None:
            self.critic.learner.lr_scale = self.actor.learner.lr_scale

    def busy_seconds(self) -> float:
        forward_backwards = [self.reference]
        forward_backwards += [
            None if model is None else model.forward_backward
            for model in (self.critic, self.teacher)
        ]
        return super().busy_seconds() + sum(
            forward_backward.pop_busy_seconds()
            for forward_backward in forward_backwards
            if forward_backward is not None
        )


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step of this data-parallel rank."""

    batches: list[MicroBatch]
    old: list[Tensor] | None
    """Log-probs under the policy at the step's beginning; None: the engine's are used."""
    reference: list[Tensor] | None
    """Log-probs under the reference; None: no KL in the loss."""
    teacher: TeacherStates | None
    """States that give the teacher's whole distributions; None: they are not in the loss."""


@dataclass(eq=False, repr=False)
class PolicyUpdater:
    """The updating half of a step, one for each length stage; it needs no engine."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    actor: Actor
    reference: ForwardBackward | None
    offload: OffloadSets
    timers: PhaseTimers
    critic: Critic | None = None
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        algorithm = self.config.algorithm
        max_new_tokens = self.config.rollout.max_new_tokens
        self.cost = training_cost(self.shape, frozen=self.config.lora.rank > 0)
        self.normalisation = Normalisation(algorithm.loss_normalisation, max_new_tokens)
        self.rules = token_rules(algorithm)
        self.is_void = void_rule_of(self.config, "mask")
        self.kl_in_reward = self.reference is not None and algorithm.kl_in == "reward"

    def teaches(self, loss: str) -> bool:
        """Whether there is a teacher and `TeacherConfig.loss` is this word."""
        return self.teacher is not None and self.config.teacher.loss == loss

    def update(
        self,
        groups: Sequence[ScoredGroup],
        number: int,
        own_advantages: list[list[float]] | None = None,
        routes: RouteStore | None = None,
    ) -> UpdateRecord:
        """Learn from the groups of step `number`.

        `own_advantages` are those of a function of the user's, if there is one; `routes` hold what
        this rank's engine has recorded, where it does. A minibatch whose ratio leaves its bounds is
        discarded. Without any completion, or where the loss would have no gradient, nothing
        happens. A collective."""
        algorithm = self.config.algorithm
        scored = self.score(groups, number)
        means_PG = own_advantages
        if means_PG is None:
            means_PG = self.reward_advantages(groups, scored.rewards_PG, scored.tokens_PG)
        if not groups:
            return UpdateRecord([], means_PG, None)
        if self.has_no_gradient(means_PG):
            details = "all advantages are 0; the update is skipped"
            logger.info(
                "step %d: %s", number + 1, details, extra=event("skipped update", number + 1)
            )
            return UpdateRecord([], means_PG, None)
        packed = self.pack(scored, means_PG, routes)
        unreplayed = self.unreplayed_mismatch(packed)
        packed, logprobs = self.replayed_logprobs(packed)
        counts = self.routing_counts()
        shaped = Advantages(packed.batches, means_PG)
        for part in self.parts(number):
            shaped = part.apply(packed, logprobs, shaped)
        results: list[MinibatchResult] = []
        if not self.pretrains(number):
            self.actor.learner.step_version = self.actor.learner.updates
            minibatches = self.minibatches(packed, logprobs, shaped)
            orders = packed.orders(algorithm.epochs, algorithm.shuffle)
            routing = self.actor.forward_backward.routing
            replays_old = self.config.policy.routing_replay == "old"
            with self.timers.phase("update"), self.offload.on_device("teacher_head"):
                for minibatch in (minibatches[index] for order in orders for index in order):
                    if routing is not None:
                        routing.is_counting = not counts and (replays_old or not results)
                    result = self.actor.learner.learn(
                        minibatch.batches,
                        minibatch.old,
                        minibatch.reference,
                        on_policy=self.config.on_policy,
                        teacher=minibatch.teacher,
                    )
                    results.append(result)
                    if result.discarded is not None:
                        logger.info(
                            "step %d: minibatch %d discarded: %s",
                            number + 1,
                            len(results),
                            result.discarded,
                            extra=event("discarded", number + 1),
                        )
                        if algorithm.early_stop_action == "end" and not result.overflowed:
                            break
            counts = counts or self.routing_counts()
        return UpdateRecord(
            results,
            shaped.means_PG,
            shaped.reward_kl,
            passes=len(results) / len(packed.minibatch_slices),
            critic_results=list(shaped.critic_results),
            critic_metrics=dict(shaped.critic_metrics),
            teacher_kl=shaped.teacher_kl,
            routing=counts,
            unreplayed=unreplayed,
        )

    def has_no_gradient(self, means_PG: Sequence[Sequence[float]]) -> bool:
        """Whether nothing is to be learned.

        All advantages are 0 then, as for equal rewards, and the loss has no other part."""
        algorithm = self.config.algorithm
        entropy = algorithm.entropy_coef or algorithm.entropy_target
        other_parts = self.reference or self.critic or self.teacher or entropy
        return not other_parts and not any(chain.from_iterable(means_PG))

    def score(self, groups: Sequence[ScoredGroup], number: int) -> ScoredStep:
        """The step's groups with their rewards, summed over the reward functions."""
        rewards_PG = [summed_rewards(group, self.config.reward) for group in groups]
        return ScoredStep(number, groups, rewards_PG, tokens_PG=token_counts(groups))

    def pack(
        self,
        scored: ScoredStep,
        means_PG: Sequence[Sequence[float]],
        routes: RouteStore | None = None,
    ) -> PackedStep:
        """This data-parallel rank's micro-batches, with the engines' routes where they replay them.

        All tokens of a completion have its advantage. A collective with such routes, which `routes`
        hold no longer."""
        with self.timers.phase("pack"):
            algorithm = self.config.algorithm
            needs_lag = algorithm.recompute_logprobs and algorithm.proximal_logprobs != "recompute"
            version = self.actor.learner.updates if needs_lag else None
            samples = make_samples(scored.groups, means_PG, version, is_void=self.is_void)
            packed = self.pack_minibatches(samples, scored.number)
            batches = list(chain.from_iterable(packed))
            if routes is not None:
                batches = self.with_fetched_routes(batches, samples, routes)
        bounds = pairwise(accumulate(map(len, packed), initial=0))
        slices = tuple(slice(start, end) for start, end in bounds)
        seed = step_seed(self.config.run.seed, scored.number)
        return PackedStep(scored, batches, slices, seed=seed)

    def with_fetched_routes(
        self, batches: Sequence[MicroBatch], samples: Sequence[Sample], routes: RouteStore
    ) -> list[MicroBatch]:
        """The micro-batches with their samples' routes, which the store holds no longer.

        A collective."""
        routing = self.actor.forward_backward.routing
        assert routing is not None
        fetched = fetch_routes(
            routes,
            routes_needed(batches, samples),
            routing.layers,
            experts_per_token=self.shape.experts_per_token,
            dtype=expert_dtype(self.shape.num_experts),
        )
        routes.drop(place for sample in samples for place in sample.routes_at)
        return [with_routes(batch, samples, fetched) for batch in batches]

    def routing_counts(self) -> dict[str, float]:
        """What passes that replay have counted, over all ranks, and the end of counting.

        Empty where none has. A collective."""
        routing = self.actor.forward_backward.routing
        if routing is None:
            return {}
        counts = reduce_over_ranks(routing.pop_counts(), {})[0]
        return counts if counts["pairs"] else {}

    def unreplayed_mismatch(self, packed: PackedStep) -> Mismatch | None:
        """How far the policy is from the engines where it chooses experts by itself.

        It is measured until the run's first update, of the micro-batches whose mismatch with replay
        is measured; None where engines' routes are not replayed, and later. A collective."""
        replays = self.config.policy.routing_replay == "engine"
        learner = self.actor.learner
        if not replays or learner.updates or self.pretrains(packed.scored.number):
            return None
        batches = packed.batches
        if not self.config.algorithm.recomputes:
            batches = batches[packed.minibatch_slices[0]]
        unrouted = [replace(batch, experts_TLK=None, is_routed_T=None) for batch in batches]
        with self.timers.phase("mismatch"):
            logprobs = self.actor.forward_backward.logprobs(unrouted)
        differences = [torch.zeros(0)]
        if self.mesh.is_last_stage:
            differences += [
                (logprobs_T.cpu() - batch.behaviour_logprobs_T)[batch.sampled_T].abs()
                for batch, logprobs_T in zip(unrouted, logprobs, strict=True)
            ]
        nats = torch.cat(differences)
        sums, largest = reduce_over_ranks(
            {"nats": float(nats.sum()), "tokens": float(len(nats))},
            {"nats": max(nats.tolist(), default=0.0)},
        )
        return Mismatch(sums["nats"] / sums["tokens"], largest["nats"])

    def replayed_logprobs(self, packed: PackedStep) -> tuple[PackedStep, StepLogprobs]:
        """`logprobs`, counting what differs, and the step, which replays their routes if it is to.

        A collective."""
        routing = self.actor.forward_backward.routing
        if routing is None:
            return packed, self.logprobs(packed)
        if self.config.policy.routing_replay == "engine":
            routing.is_counting = True
            return packed, self.logprobs(packed)
        with routing.recording():
            logprobs = self.logprobs(packed)
        return replace(packed, batches=routing.recorded(packed.batches)), logprobs

    def logprobs(self, packed: PackedStep) -> StepLogprobs:
        """Log-probs under the policy, where they are recomputed, and under the reference.

        A collective."""
        old = reference = entropy = None
        if self.kl_in_reward or not self.pretrains(packed.scored.number):
            recomputes = self.config.algorithm.recomputes
            if self.rules is not None:
                with self.timers.phase("logprobs"):
                    scored = self.actor.forward_backward.logprobs_and_entropies(packed.batches)
                old = [logprobs_T for logprobs_T, _ in scored] if recomputes else None
                entropy = [entropy_T for _, entropy_T in scored]
            elif recomputes and not self.config.on_policy:
                with self.timers.phase("logprobs"):
                    old = self.actor.forward_backward.logprobs(packed.batches)
            if self.reference is not None:
                with self.timers.phase("reference"), self.offload.on_device("reference"):
                    reference = self.reference.logprobs(packed.batches)
        return StepLogprobs(old, reference, entropy)

    def pretrains(self, number: int) -> bool:
        """Whether only the critic learns in this step."""
        return self.critic is not None and number < self.config.critic.pretrain_steps

    def parts(self, number: int) -> list[AdvantagePart]:
        """The parts that change the advantages of step `number`, in their order."""
        parts: list[AdvantagePart] = []
        if self.critic is not None:
            parts.append(
                CriticInAdvantages(
                    self.critic,
                    self.config,
                    self.kl_in_reward,
                    mesh=self.mesh,
                    offload=self.offload,
                    timers=self.timers,
                )
            )
        elif self.kl_in_reward:
            parts.append(KLInReward(self.config.algorithm, self.mesh))
        if self.teacher is not None and self.teaches("advantage") and not self.pretrains(number):
            parts.append(
                TeacherInAdvantages(
                    self.teacher,
                    self.actor,
                    coef=self.config.teacher.coef,
                    vocab_size=self.shape.vocab_size,
                    offload=self.offload,
                    timers=self.timers,
                    mesh=self.mesh,
                )
            )
        if self.rules is not None and not self.pretrains(number):
            parts.append(TokensThatCount(self.rules, self.mesh))
        return parts

    def minibatches(
        self, packed: PackedStep, logprobs: StepLogprobs, advantages: Advantages
    ) -> list[Minibatch]:
        """The minibatch of each optimizer step, with the teacher's states if its loss needs them.

        A collective."""
        states = None
        if self.teacher is not None and self.teaches("full"):
            with self.timers.phase("teacher"), self.offload.on_device("teacher", "teacher_head"):
                states = self.teacher.states(advantages.batches)
        old = logprobs.old
        reference = (
            None if self.kl_in_reward else logprobs.reference
        )  # else it is in the advantages
        return [
            Minibatch(
                advantages.batches[minibatch_slice],
                old[minibatch_slice] if old else None,
                reference[minibatch_slice] if reference else None,
                teacher=states[minibatch_slice] if states else None,
            )
            for minibatch_slice in packed.minibatch_slices
        ]

    def reward_advantages(
        self,
        groups: Sequence[ScoredGroup],
        rewards_PG: Sequence[Sequence[float]],
        tokens_PG: Sequence[Sequence[int]],
    ) -> list[list[float]]:
        """Advantages of the rewards, by group and completion.

        They are 0 where the critic will give them, or where the teacher alone is learned from."""
        algorithm = self.config.algorithm
        teacher = self.config.teacher
        if algorithm.advantage == "gae" or (self.teacher is not None and not teacher.with_rewards):
            return [[0.0] * len(row) for row in rewards_PG]
        if self.config.reward.combine == "gdpo":
            weights = [named_reward.weight for named_reward in named_rewards(self.config.reward)]
            parts_PG = [[score.parts for score in group.scores] for group in groups]
            return gdpo_advantages(parts_PG, weights, algorithm.advantage_eps)
        if not groups:
            return []
        return advantages(
            rewards_PG,
            tokens_PG,
            algorithm.advantage,
            eps=algorithm.advantage_eps,
            pass_k=algorithm.pass_k,
        )

    def pack_minibatches(self, samples: Sequence[Sample], number: int) -> list[list[MicroBatch]]:
        """This data-parallel rank's micro-batches of every minibatch."""
        config = self.config
        mesh = self.mesh
        schedule = plan_minibatches(
            [sample.length for sample in samples],
            min(config.algorithm.n_minibatches, len(samples)),
            mesh.data,
            max_tokens=config.policy.max_tokens_per_microbatch,
            seed=step_seed(config.run.seed, number),
            cost=self.cost,
            count_multiple=mesh.microbatch_multiple,
            shuffle=config.algorithm.shuffle,
        )
        pad_to_multiple = mesh.tensor if config.parallel.sequence else 1
        return [
            [
                pack(samples, indices, pad_to_multiple, self.normalisation)
                for indices in minibatch.microbatches_by_rank[mesh.data_rank]
            ]
            for minibatch in schedule
        ]


def make_samples(
    groups: Sequence[ScoredGroup],
    advantages_PG: Sequence[Sequence[float]],
    version: int | None = None,
    is_void: VoidRule | None = None,
) -> list[Sample]:
    """All sequences to train on with their advantages, in order of prompt and completion.

    With a `version` of the weights, they have how far their tokens are behind it. Last turns that
    `is_void` names have no weight in the gradient."""
    return [
        Sample(
            group.prompt.token_ids,
            completion.token_ids,
            completion.logprobs,
            advantage=advantage,
            sampled=completion.sampled,
            learned=learned_tokens(group.prompt, completion, is_void),
            lag=None if version is None else completion.lag(version),
            routes_at=completion.routes_at,
        )
        for group, row in zip(groups, advantages_PG, strict=True)
        for completion, advantage in zip(group.completions, row, strict=True)
    ]


def token_counts(groups: Sequence[ScoredGroup]) -> list[list[int]]:
    """Sampled tokens of the completions by group and sample."""
    return [[completion.n_sampled for completion in group.completions] for group in groups]


def step_seed(run_seed: int, number: int) -> int:
    """The seed of everything that step `number` shuffles."""
    return run_seed * 1_000_003 + number
