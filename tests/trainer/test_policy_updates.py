"""What the updates of a step hand to the learners, with a learner that only keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    PolicyConfig,
    RunConfig,
    TeacherConfig,
)
from rlmath.data.packing import MicroBatch
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.models.learner import MinibatchResult
from rlmath.rollout.routes import RouteStore
from rlmath.trainer.policy_update import PolicyUpdater
from rlmath.trainer.token_advantages import Advantages, PackedStep
from tests.tiny_models import shape_of

pytestmark = pytest.mark.usefixtures("process_group")

NOTHING: Any = None
MOVED = {"policy": 0.5, "reference": 0.25}
"""How much the log-probs of a model are above the engine's."""


class Offload:
    """Tells which sets are on the device; the others may not compute."""

    def __init__(self) -> None:
        self.there: set[str] = set()

    @contextmanager
    def on_device(self, *names: str) -> Iterator[None]:
        self.there |= set(names)
        yield
        self.there -= set(names)


class Learner:
    """Keeps what it learns from, and gives results one after the other."""

    def __init__(self, results: Sequence[MinibatchResult] = ()) -> None:
        self.updates = 4
        self.learned: list[dict[str, Any]] = []
        self.routing: Any = None
        self.step_version: int | None = None
        self._results = list(results)

    def learn(
        self,
        batches: list[MicroBatch],
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
        on_policy: bool,
        teacher: Any,
    ) -> MinibatchResult:
        self.learned.append(
            {
                "batches": batches,
                "old": old,
                "reference": reference,
                "on_policy": on_policy,
                "teacher": teacher,
                "counts": self.routing is not None and self.routing.is_counting,
            }
        )
        self.updates += 1
        return self._results.pop(0) if self._results else result()


def result(discarded: str | None = None, overflowed: bool = False) -> MinibatchResult:
    return MinibatchResult(
        {}, {}, 1.0, learning_rate=0.1, discarded=discarded, overflowed=overflowed
    )


def group(number: int, *rewards: float) -> ScoredGroup:
    """A group whose g-th completion has g + 1 tokens."""
    completions = tuple(
        Completion(
            g,
            tuple(range(7, 8 + g)),
            (-1.0 - number - 0.1 * g,) * (g + 1),
            text="",
            finish_reason="stop",
            policy_version=3,
        )
        for g in range(len(rewards))
    )
    scores = tuple(Score(reward, reward > 0, "", "string") for reward in rewards)
    return ScoredGroup(
        Prompt(f"q{number}", "?", (5, 6), solutions=("2",), task="math"), completions, scores
    )


GROUPS = [group(0, 1.0, 0.0), group(1, 0.0, 3.0)]
EQUAL = [group(0, 1.0, 1.0), group(1, 0.0, 0.0)]


def logprobs(batches: Sequence[MicroBatch], model: str) -> list[Tensor]:
    return [batch.behaviour_logprobs_T + MOVED[model] for batch in batches]


def updater(folder: Path, config: Config, learner: Learner, **models: Any) -> PolicyUpdater:
    """An updater of a policy whose log-probs and entropies are made up."""
    forward_backward = SimpleNamespace(
        routing=None,
        logprobs=lambda batches: logprobs(batches, "policy"),
        logprobs_and_entropies=lambda batches: [
            (policy_logprobs_T, -policy_logprobs_T)
            for policy_logprobs_T in logprobs(batches, "policy")
        ],
    )
    actor: Any = SimpleNamespace(learner=learner, forward_backward=forward_backward)
    offload: Any = models.pop("offload", Offload())
    return PolicyUpdater(
        config,
        shape_of(folder),
        Mesh(0, 1, 1, pipeline=1, engine_size=1),
        actor=actor,
        reference=models.pop("reference", None),
        offload=offload,
        timers=PhaseTimers(),
        **models,
    )


def config_of(teacher: TeacherConfig | None = None, **algorithm: Any) -> Config:
    return Config(
        run=RunConfig(seed=11),
        algorithm=AlgorithmConfig(**algorithm),
        teacher=teacher or TeacherConfig(),
        policy=PolicyConfig(max_tokens_per_microbatch=5),
    )


def reference_on(offload: Offload) -> Any:
    """A reference that computes on the device alone."""

    def computed(batches: Sequence[MicroBatch]) -> list[Tensor]:
        assert offload.there == {"reference"}
        return logprobs(batches, "reference")

    return SimpleNamespace(logprobs=computed)


def teacher_on(offload: Offload) -> Any:
    """A teacher whose states are the numbers of the samples."""

    def states(batches: Sequence[MicroBatch]) -> list[tuple[int, ...]]:
        assert offload.there == {"teacher", "teacher_head"}
        return [batch.sample_indices for batch in batches]

    return SimpleNamespace(states=states)


def are_equal(tensors: list[Tensor] | None, expected: list[Tensor]) -> bool:
    return tensors is not None and all(
        torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True)
    )


def test_every_minibatch_has_its_own_log_probs_and_states_in_each_epoch(tied_model: Path) -> None:
    """Each of four completions is a minibatch; three epochs, each in an order of its own."""
    taught = TeacherConfig(path="t", loss="full", with_rewards=True)
    config = config_of(taught, kl_coef=0.1, epochs=3, n_minibatches=4)
    offload = Offload()
    learner = Learner()
    policy_updater = updater(
        tied_model,
        config,
        learner,
        offload=offload,
        reference=reference_on(offload),
        teacher=teacher_on(offload),
    )
    update = policy_updater.update(GROUPS, 5)
    assert len(learner.learned) == 12 and update.passes == 3.0
    for learned in learner.learned:
        assert are_equal(learned["old"], logprobs(learned["batches"], "policy"))
        assert are_equal(learned["reference"], logprobs(learned["batches"], "reference"))
        assert learned["teacher"] == [batch.sample_indices for batch in learned["batches"]]
        assert not learned["on_policy"]
    indices = [learned["batches"][0].sample_indices for learned in learner.learned]
    epochs = [indices[start : start + 4] for start in (0, 4, 8)]
    assert all(sorted(epoch) == [(0,), (1,), (2,), (3,)] for epoch in epochs)
    orders = PackedStep(
        NOTHING, [], tuple(slice(n, n + 1) for n in range(4)), seed=11 * 1_000_003 + 5
    ).orders(3, shuffle=True)
    assert epochs == [[epochs[0][place] for place in order] for order in orders]
    assert learner.step_version == 4, "the weights that the step began with"
    assert update.advantages[0][0] == -update.advantages[0][1] > 0


def test_one_minibatch_that_is_learned_from_once_needs_no_log_probs_before(
    tied_model: Path,
) -> None:
    """A function of the user's gives the advantages."""
    learner = Learner()
    update = updater(tied_model, config_of(), learner).update(GROUPS, 0, [[7.0, 8.0], [9.0, 10.0]])
    (learned,) = learner.learned
    assert learned["on_policy"] and learned["old"] is learned["reference"] is None
    assert update.advantages == [[7.0, 8.0], [9.0, 10.0]]
    advantage_by_sample = {
        index: batch.advantages_T[batch.segments_T == place][-1].item()
        for batch in learned["batches"]
        for place, index in enumerate(batch.sample_indices)
    }
    assert advantage_by_sample == {0: 7.0, 1: 8.0, 2: 9.0, 3: 10.0}


@pytest.mark.parametrize(
    ("action", "second", "learned"),
    [
        ("end", result("the ratio is 6"), 2),
        ("end", result("overflow", overflowed=True), 4),
        ("skip", result("the ratio is 6"), 4),
    ],
    ids=["end", "overflow", "skip"],
)
def test_a_discarded_minibatch_ends_the_step_where_that_is_set_and_no_scale_overflowed(
    tied_model: Path, action: str, second: MinibatchResult, learned: int
) -> None:
    learner = Learner([result(), second])
    config = config_of(n_minibatches=4, early_stop_action=action)
    update = updater(tied_model, config, learner).update(GROUPS, 0)
    assert len(learner.learned) == len(update.results) == learned
    assert update.results[1] is second and update.passes == learned / 4


def test_a_step_without_any_advantage_is_skipped_and_told(
    tied_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    learner = Learner()
    policy_updater = updater(tied_model, config_of(), learner)
    update = policy_updater.update(EQUAL, 6)
    assert not learner.learned and update.results == []
    assert update.advantages == [[0.0, 0.0]] * 2 and update.passes == 0.0
    assert "step 7: all advantages are 0; the update is skipped" in caplog.text
    caplog.clear()
    assert policy_updater.update([], 6).advantages == [] and not caplog.text


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ({}, "reference"),
        ({}, "critic"),
        ({}, "teacher"),
        ({"entropy_coef": 0.1}, None),
        ({"entropy_target": 0.2}, None),
    ],
)
def test_a_loss_with_another_part_has_a_gradient_without_advantages(
    tied_model: Path, algorithm: dict[str, Any], model: str | None
) -> None:
    models: dict[str, Any] = {} if model is None else {model: object()}
    policy_updater = updater(tied_model, config_of(**algorithm), Learner(), **models)
    assert not policy_updater.has_no_gradient([[0.0, 0.0]])
    plain = updater(tied_model, config_of(), Learner())
    assert plain.has_no_gradient([[0.0], [0.0]]) and not plain.has_no_gradient([[0.0], [0.1]])


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_reference_is_in_the_loss_or_in_the_advantages(tied_model: Path, kl_in: str) -> None:
    config = config_of(kl_in=kl_in, kl_coef=0.5, epochs=2)
    offload = Offload()
    learner = Learner()
    policy_updater = updater(
        tied_model, config, learner, offload=offload, reference=reference_on(offload)
    )
    update = policy_updater.update(GROUPS, 0)
    in_loss = kl_in == "loss"
    assert [learned["reference"] is not None for learned in learner.learned] == [in_loss] * 2
    assert (update.reward_kl is None) is in_loss
    unshaped = policy_updater.reward_advantages(GROUPS, [[1.0, 0.0], [0.0, 3.0]], [[1, 2]] * 2)
    assert (update.advantages == unshaped) is in_loss


@pytest.mark.parametrize("recompute", [True, False])
def test_rules_for_tokens_need_the_entropy_and_the_policys_log_probs_where_these_are_recomputed(
    tied_model: Path, recompute: bool
) -> None:
    config = config_of(top_entropy_share=0.5, recompute_logprobs=recompute)
    policy_updater = updater(tied_model, config, Learner())
    packed = policy_updater.pack(policy_updater.score(GROUPS, 0), [[1.0, 1.0], [1.0, 1.0]])
    scored = policy_updater.logprobs(packed)
    expected = logprobs(packed.batches, "policy")
    assert are_equal(scored.entropy, [-policy_logprobs_T for policy_logprobs_T in expected])
    assert are_equal(scored.old, expected) if recompute else scored.old is None


def test_no_log_probs_are_computed_while_the_critic_learns_alone_unless_its_rewards_have_the_kl(
    tied_model: Path,
) -> None:
    for kl_in in ("loss", "reward"):
        config = replace(
            config_of(advantage="gae", kl_in=kl_in, kl_coef=0.1, epochs=2),
            critic=CriticConfig(pretrain_steps=2),
        )
        offload = Offload()
        policy_updater = updater(
            tied_model,
            config,
            Learner(),
            offload=offload,
            reference=reference_on(offload),
            critic=object(),
        )
        means_PG = [[0.0, 0.0], [0.0, 0.0]]
        for number in (1, 2):
            packed = policy_updater.pack(policy_updater.score(GROUPS, number), means_PG)
            scored = policy_updater.logprobs(packed)
            is_scored = kl_in == "reward" or number == 2
            assert (scored.old is not None) is (scored.reference is not None) is is_scored


def test_a_step_in_which_the_critic_learns_alone_reports_it_and_moves_no_policy(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts change the advantages one after the other."""

    class Part:
        def __init__(self, shift: float) -> None:
            self.shift = shift

        def apply(self, packed: Any, logprobs: Any, advantages: Advantages) -> Advantages:
            means_PG = [[mean + self.shift for mean in row] for row in advantages.means_PG]
            return replace(
                advantages,
                means_PG=means_PG,
                critic_results=[result()],
                critic_metrics={"critic/loss": self.shift},
                teacher_kl=0.75,
            )

    parts = [Part(1.0), Part(0.5)]
    monkeypatch.setattr(PolicyUpdater, "parts", lambda self, number: parts)
    config = replace(config_of(advantage="gae"), critic=CriticConfig(pretrain_steps=1))
    learner = Learner()
    policy_updater = updater(tied_model, config, learner, critic=object())
    update = policy_updater.update(GROUPS, 0)
    assert not learner.learned and update.results == [] and update.passes == 0.0
    assert update.advantages == [[1.5, 1.5]] * 2
    assert update.critic_metrics == {"critic/loss": 0.5} and update.teacher_kl == 0.75
    assert update.critic_results == [result()]
    policy_updater.update(GROUPS, 1)
    assert len(learner.learned) == 1


# ---------------------------------------------------------------- routes


class Routing:
    """Counts 2 differing pairs of 8 in each pass in which it is asked to."""

    layers = (0, 2)

    def __init__(self) -> None:
        self.is_counting = False
        self.passes = 0

    def count(self) -> None:
        self.passes += self.is_counting

    def pop_counts(self) -> dict[str, float]:
        passes = self.passes
        self.passes = 0
        self.is_counting = False
        return {"pairs": 8.0 * passes, "differing_pairs": 2.0 * passes}

    def recording(self) -> Any:
        return nullcontext()

    def recorded(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        return [replace(batch, is_routed_T=torch.ones(1)) for batch in batches]


@pytest.mark.parametrize(
    ("replays", "epochs", "counted", "pairs"),
    [
        ("engine", 2, [False] * 4, 8.0),
        ("engine", 1, [False] * 2, 8.0),
        ("old", 2, [True] * 4, 32.0),
    ],
)
def test_choices_of_experts_are_counted_in_the_first_pass_that_replays_or_in_all_updates(
    tied_model: Path, replays: Any, epochs: int, counted: list[bool], pairs: float
) -> None:
    config = config_of(epochs=epochs, n_minibatches=2)
    config = replace(config, policy=replace(config.policy, routing_replay=replays))
    learner = Learner()
    policy_updater = updater(tied_model, config, learner)
    forward_backward: Any = policy_updater.actor.forward_backward
    forward_backward.routing = learner.routing = routing = Routing()
    learn = learner.learn

    def with_count(*columns: Any, **named: Any) -> MinibatchResult:
        routing.count()
        return learn(*columns, **named)

    def scored(batches: list[MicroBatch]) -> list[Tensor]:
        routing.count()
        return logprobs(batches, "policy")

    learner.learn = with_count  # type: ignore[method-assign]
    forward_backward.logprobs = scored
    update = policy_updater.update(GROUPS, 0)
    assert [learned["counts"] for learned in learner.learned] == counted
    assert update.routing["pairs"] == pairs
    batches = chain.from_iterable(learned["batches"] for learned in learner.learned)
    assert {batch.is_routed_T is not None for batch in batches} == {replays == "old"}


def test_where_no_log_probs_are_recomputed_the_first_minibatch_counts_the_engines_routes(
    tied_model: Path,
) -> None:
    config = config_of(n_minibatches=2, recompute_logprobs=False)
    config = replace(config, policy=replace(config.policy, routing_replay="engine"))
    learner = Learner()
    policy_updater = updater(tied_model, config, learner)
    forward_backward: Any = policy_updater.actor.forward_backward
    forward_backward.routing = learner.routing = Routing()
    policy_updater.update(GROUPS, 0)
    assert [learned["counts"] for learned in learner.learned] == [True, False]


def test_a_step_without_a_policy_that_routes_counts_nothing(tied_model: Path) -> None:
    assert updater(tied_model, config_of(), Learner()).update(GROUPS, 0).routing == {}


def test_micro_batches_take_the_engines_routes_of_this_ranks_layers_from_the_store(
    tied_model: Path,
) -> None:
    """Three layers have two experts a token; this rank has the first and the third."""
    store = RouteStore(0)
    groups = []
    routes = []
    for scored_group in GROUPS:
        completions = []
        for completion in scored_group.completions:
            tokens = len(scored_group.prompt.token_ids) + len(completion.token_ids) - 1
            routes.append(torch.arange(tokens * 6, dtype=torch.uint8).view(tokens, 3, 2))
            completions.append(replace(completion, routes_at=(store.keep(routes[-1]),)))
        groups.append(replace(scored_group, completions=tuple(completions)))
    config = config_of(n_minibatches=2)
    config = replace(config, policy=replace(config.policy, routing_replay="engine"))
    learner = Learner()
    policy_updater = updater(tied_model, config, learner)
    forward_backward: Any = policy_updater.actor.forward_backward
    forward_backward.routing = learner.routing = Routing()
    policy_updater.update(groups, 0, routes=store)
    batches = list(chain.from_iterable(learned["batches"] for learned in learner.learned))
    assert sorted(index for batch in batches for index in batch.sample_indices) == [0, 1, 2, 3]
    for batch in batches:
        for index, start in zip(batch.sample_indices, batch.bounds, strict=False):
            assert batch.experts_TLK is not None
            replayed = batch.experts_TLK[start : start + len(routes[index])]
            assert torch.equal(replayed, routes[index][:, [0, 2]])
    assert store.bytes == 0
