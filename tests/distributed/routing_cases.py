"""What the ranks do in the tests of routing replay."""

# Shape legend: N tokens of one sample that have a route, L layers, K experts of a token in a layer.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from rlmath.algorithms.types import Completion, Prompt, RoutesAt, Sample, Score, ScoredGroup
from rlmath.config.schema import AlgorithmConfig, RewardConfig, RolloutConfig
from rlmath.data.packing import MicroBatch
from rlmath.data.routes import places_of, with_routes
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.phase_timers import PhaseTimers
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.rollout.routes import RouteStore
from tests.distributed.policy_cases import (
    Case,
    Stage,
    build,
    by_sample,
    microbatches,
    whole_gradients,
)
from tests.tiny_models import make_samples, shape_of

SAMPLES = make_samples(24)

# ---------------------------------------------------------------- the policy


@dataclass(frozen=True)
class Passes:
    """What a policy computes; log-probs are those of this rank's samples, by their index."""

    logprobs: dict[int, list[float]]
    gradients: dict[str, Tensor]
    counts: dict[str, float]
    """`RoutingReplay.pop_counts` of the log-probs' pass, over all ranks."""


@dataclass(frozen=True)
class Policy:
    """A policy with the weights of a folder, and the routes of SAMPLES, each [N, L, K].

    None: it replays nothing."""

    folder: Path
    case: Case
    routes: Sequence[Tensor] | None


def passes(policy: Policy) -> Passes:
    """A pass for log-probs and one with gradients, both with the policy's routes."""
    stage = build(policy.folder, replace(policy.case, optimizer="sgd"), routing_replay="engine")
    batches = _routed(stage, policy.routes)
    stage.actor.forward_backward.routing.is_counting = True
    logprobs = _logprobs(stage, batches)
    counts = _counts(stage)
    learner = stage.actor.learner
    learner.forward_backward.zero_grad()
    learner.forward_backward.run(
        batches,
        partial(learner._loss, old=None, reference=None, on_policy=False, teacher=None),
        forward_only=False,
    )
    return Passes(logprobs, whole_gradients(stage), counts)


def old_routes(
    folders: tuple[Path, Path], case: Case
) -> tuple[dict[int, list[float]], dict[int, list[float]], dict[int, list[float]]]:
    """Log-probs of a pass that records its routes, of their replay, and of that with other weights.

    The folders have the first weights and the others."""
    from rlmath.checkpoint.hf.weights import load_hf_weights

    folder, other_folder = folders
    stage = build(folder, case, routing_replay="old")
    routing = stage.actor.forward_backward.routing
    batches = microbatches(stage, SAMPLES)
    with routing.recording():
        first = _logprobs(stage, batches)
    batches = routing.recorded(batches)
    again = _logprobs(stage, batches)
    load_hf_weights(stage.actor.chunks, str(other_folder), stage.shape, mesh=stage.mesh)
    return first, again, _logprobs(stage, batches)


def reference_logprobs(policy: Policy) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Log-probs of a reference that is the policy without its adapters, without and with routes.

    The policy has replayed those before."""
    from rlmath.models.build import build_reference

    stage = build(policy.folder, policy.case, routing_replay="engine")
    reference = build_reference(
        stage.config,
        stage.shape,
        stage.mesh,
        device=stage.device,
        stop_token_ids=(1,),
        actor=stage.actor,
    )
    plain = _routed(stage, None)
    plain_logprobs = reference.logprobs(plain)
    routed = _routed(stage, policy.routes)
    _logprobs(stage, routed)
    return by_sample(plain, plain_logprobs), by_sample(routed, reference.logprobs(routed))


@dataclass(frozen=True)
class Step:
    """A step with the first of SAMPLES in two minibatches, one after the other."""

    samples: int
    replay: Literal["engine", "old"]
    recomputes: bool = True


def step(policy: Policy, step: Step) -> tuple[dict[str, float], int]:
    """What the step's update has counted, and the bytes that this rank's store has kept.

    In turn the ranks hold the routes of a sample."""
    stage = build(policy.folder, policy.case, routing_replay=step.replay)
    algorithm = AlgorithmConfig(n_minibatches=2, shuffle=False, recompute_logprobs=step.recomputes)
    samples = SAMPLES[: step.samples]
    store = RouteStore(stage.mesh.rank)
    record = _updater(stage, algorithm).update(
        _stored(policy, samples, store, stage.mesh),
        0,
        own_advantages=[[sample.advantage] for sample in samples],
        routes=store if step.replay == "engine" else None,
    )
    return record.routing, store.bytes


def first_steps(
    policy: Policy, samples: Sequence[Sample], algorithm: AlgorithmConfig
) -> list[dict[str, float]]:
    """The mismatch of two steps with the same samples, with the engines' routes and without."""
    from rlmath.trainer.metrics import mismatch_metrics, unreplayed_metrics

    stage = build(policy.folder, policy.case, routing_replay="engine")
    updater = _updater(stage, algorithm)
    steps = []
    for number in range(2):
        store = RouteStore(stage.mesh.rank)
        record = updater.update(
            _stored(policy, samples, store, stage.mesh),
            number,
            own_advantages=[[sample.advantage] for sample in samples],
            routes=store,
        )
        mismatch = mismatch_metrics(record.results, only_first=not algorithm.recomputes)
        steps.append(unreplayed_metrics(record.unreplayed) | mismatch)
    return steps


def _updater(stage: Stage, algorithm: AlgorithmConfig) -> Any:
    from rlmath.models.offload import training_sets
    from rlmath.trainer.policy_update import PolicyUpdater

    return PolicyUpdater(
        replace(stage.config, algorithm=algorithm),
        stage.shape,
        stage.mesh,
        stage.actor,
        reference=None,
        offload=training_sets(stage.actor, None, stage.config.memory, stage.device),
        timers=PhaseTimers(),
    )


def _stored(
    policy: Policy, samples: Sequence[Sample], store: RouteStore, mesh: Mesh
) -> list[ScoredGroup]:
    """Groups of one of the samples each, the first of SAMPLES, whose routes the ranks hold."""
    assert policy.routes is not None
    groups = []
    for number, sample in enumerate(samples):
        routes = policy.routes[number]
        holder = number % mesh.world_size
        place = RoutesAt(holder, number // mesh.world_size, len(routes))
        if holder == mesh.rank:
            assert store.keep(routes) == place
        completion = Completion(
            0,
            sample.completion_ids,
            sample.behaviour_logprobs,
            text="",
            finish_reason="stop",
            policy_version=0,
            routes_at=(place,),
        )
        prompt = Prompt(f"q-{number}", "?", tuple(sample.prompt_ids), ("1",), task="math")
        score = Score(1.0, correct=True, extracted="", verdict="string")
        groups.append(ScoredGroup(prompt, (completion,), (score,)))
    return groups


def _routed(stage: Stage, routes: Sequence[Tensor] | None) -> list[MicroBatch]:
    if routes is None:
        return microbatches(stage, SAMPLES)
    places = [RoutesAt(0, number, len(rows)) for number, rows in enumerate(routes)]
    placed = [
        replace(sample, routes_at=(place,)) for sample, place in zip(SAMPLES, places, strict=True)
    ]
    layers = stage.actor.forward_backward.routing.layers
    of_place = {place: rows[:, layers] for place, rows in zip(places, routes, strict=True)}
    return [with_routes(batch, placed, of_place) for batch in microbatches(stage, placed)]


def _logprobs(stage: Stage, batches: list[MicroBatch]) -> dict[int, list[float]]:
    logprobs = stage.actor.forward_backward.logprobs(batches)
    return by_sample(batches, logprobs) if stage.mesh.is_last_stage else {}


def _counts(stage: Stage) -> dict[str, float]:
    from rlmath.distributed.collectives import reduce_over_ranks

    return reduce_over_ranks(stage.actor.forward_backward.routing.pop_counts(), {})[0]


# ---------------------------------------------------------------- engines

ROLLOUT = RolloutConfig(
    group_size=3, max_new_tokens=24, temperature=0.8, max_num_seqs=4, progress_bar=False
)


@dataclass(frozen=True)
class Sampling:
    """What an engine is to sample: two completions of each prompt."""

    settings: RolloutConfig
    prompts: list[tuple[int, ...]]
    splits_prompts: bool = False


@dataclass(frozen=True)
class Recording:
    """What an engine has sampled and recorded."""

    token_ids: list[list[int]]
    """Prompt and completion of each request."""
    routes: list[Tensor]
    """[N, L, K] of each request."""
    scheduled: list[int]
    """Tokens that vLLM computed, by step."""


def recorded(folder: Path, sampling: Sampling) -> Recording:
    from rlmath.rollout import engine as engine_module
    from rlmath.rollout.sampling import Request

    with mock.patch.object(engine_module, "CPU_CHUNKED_PREFILL", sampling.splits_prompts):
        engine, _ = _open_engine(folder, sampling.settings, engine_size=1)
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    scheduled = []

    def counted(*arguments: Any) -> Any:
        output = schedule(*arguments)
        scheduled.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    requests = [
        Request(
            key=(p, g),
            token_ids=prompt,
            seed=2 * p + g,
            min_new_tokens=sampling.settings.max_new_tokens,
            max_new_tokens=sampling.settings.max_new_tokens,
            # vLLM splits no prompt on CPU whose completion has a seed.
            temperature=0.0 if sampling.splits_prompts else 1.0,
        )
        for p, prompt in enumerate(sampling.prompts)
        for g in range(2)
    ]
    ended = list(engine.running_completions(with_routes=True).sample(requests))
    engine.close()
    return Recording(
        [[*ending.request.token_ids, *ending.completion.token_ids] for ending in ended],
        [ending.routes for ending in ended if ending.routes is not None],
        scheduled,
    )


def _open_engine(folder: Path, settings: RolloutConfig, engine_size: int) -> tuple[Any, Mesh]:
    """An engine with the folder's weights, which records routes."""
    from rlmath.rollout.engine import Engine
    from rlmath.rollout.weight_sync.shard_layouts import engine_shapes

    device = open_device("cpu")
    init_process_group(device, 120.0)
    mesh = Mesh(
        environment_rank(),
        environment_world_size(),
        tensor=1,
        pipeline=1,
        engine_size=engine_size,
    )
    engine = Engine(
        str(folder),
        settings,
        200,
        mesh=mesh,
        device=device,
        weight_shapes=engine_shapes(shape_of(folder), engine_size),
        load_weights=True,
        stop_token_ids=(1,),
        records_routes=True,
    )
    return engine, mesh


def collected_and_fetched(folder: Path, engine_size: int) -> tuple[list[int], list[Any]]:
    """A rollout's completions, after a validation, and their routes as a rank fetches them.

    Each rank fetches those of every second completion, of two layers, in an order of its own; last
    come all layers of the completions that it holds, and the messages are of a few tokens.
    Returned are the tokens of every completion and, by completion, its fetched routes."""
    from rlmath.data.tokenizer import load_tokenizer
    from rlmath.rewards.reward_manager import open_reward_workers
    from rlmath.rollout import routes as routes_module
    from rlmath.rollout.collector import CollectGroups, Collector
    from rlmath.rollout.routes import fetch_routes
    from rlmath.rollout.sampling import RolloutSeed, training_sampling

    engine, mesh = _open_engine(folder, ROLLOUT, engine_size)
    pool = open_reward_workers(RewardConfig()) if mesh.is_engine_leader else None
    store = RouteStore(mesh.rank)
    collector = Collector(
        engine,
        mesh,
        tokenizer=load_tokenizer(str(folder)),
        rollout=ROLLOUT,
        reward=RewardConfig(),
        pool=pool,
        routes=store,
    )
    prompts = [Prompt(f"q-{n}", f"{n}=", (n + 3, 50, 51), ("1",), task="math") for n in range(9)]
    command = CollectGroups(prompts, training_sampling(ROLLOUT), RolloutSeed(1, 0), "")
    collector.collect(replace(command, validates=True))
    groups = collector.collect(command).groups
    completions = [completion for group in groups for completion in group.completions]
    places = places_of(completions)
    needed = places[mesh.rank :: 2]
    needed.reverse()
    with mock.patch.object(routes_module, "MESSAGE_BYTES", 1000):
        fetched = fetch_routes(store, needed, (3, 1), experts_per_token=3, dtype=torch.uint8)
    rows = []
    for group in groups:
        for completion in group.completions:
            (place,) = completion.routes_at
            held = None if place.rank != mesh.rank else store.get(place)
            sequence = [*group.prompt.token_ids, *completion.token_ids]
            rows.append((sequence, place, held, fetched.get(place)))
    engine.close()
    if pool is not None:
        pool.close()
    return [len(row[0]) for row in rows], rows
