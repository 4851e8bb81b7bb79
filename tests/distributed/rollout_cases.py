"""What the ranks do in the tests of rollouts.

Engines with the same random weights sample, on prompts of their own.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmath.algorithms.types import Completion, Prompt, ScoredGroup
from rlmath.config.schema import RewardConfig, RolloutConfig
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.rollout.running_completions import Usage
from rlmath.rollout.sampling import Key, Request
from tests.distributed.engine_cases import Sampled, completions_of, whole_and_in_slices
from tests.tiny_models import shape_of

ROLLOUT = RolloutConfig(
    group_size=3,
    max_new_tokens=24,
    temperature=0.8,
    max_num_seqs=4,
    cpu_kv_cache_gib=0.1,
    progress_bar=False,
)
HASHED = RewardConfig(function="tests.reward_by_hash:reward")
SEEDS = {"first": (1, 0), "next step": (1, 1), "other run": (2, 0)}
"""Run seed and step of the rollouts that a hash rewards."""
SLICE = 5
"""Tokens of a slice of a completion."""
KEPT_AFTER, INTERRUPTED_AFTER = 4, 3
"""Steps of vLLM's before the first new weights, and before the second."""
PROMPTS = [Prompt(f"q-{n}", f"{n}+1=", (n + 3, 50, 51), (str(n + 1),), "math") for n in range(9)]


def _open(folder: Path, engine_size: int) -> tuple[Any, Mesh]:
    """An engine of `engine_size` ranks, with the same random weights in every engine."""
    from rlmath.rollout.engine import Engine
    from rlmath.rollout.weight_sync.shard_layouts import engine_shapes

    device = open_device("cpu")
    init_process_group(device, 120.0)
    mesh = Mesh(environment_rank(), environment_world_size(), 1, 1, engine_size)
    shapes = engine_shapes(shape_of(folder), engine_size)
    engine = Engine(str(folder), ROLLOUT, 64, mesh, device, shapes)
    _write_weights(engine.weights, shapes)
    return engine, mesh


def _write_weights(weights: Any, shapes: dict[str, tuple[int, int]]) -> None:
    """Write random weights, drawn by each parameter's name.

    vLLM's own for tests are so small that every token is equally likely after any prompt, and a
    mix-up of prompts or log-probs could not be seen."""
    weights.begin({name: rows for name, (rows, _) in shapes.items()})
    for name, shape in shapes.items():
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weights.matrix(name).copy_(torch.randn(shape, generator=draw) * 0.1 + ("norm" in name))
        weights.complete(name)
    weights.end()


def collected(folder: Path, engine_size: int, prompt_counts: list[int]) -> dict[str, Any]:
    """The groups of several rollouts by one `Collector`, and what it leaves in the store.

    Each rollout is on the first so many prompts; the weights have version 3. Then the rollouts of
    `SEEDS`, see `_hashed`; where there is one engine, by temperature, completions that are cut, see
    `_in_slices`; and completions under changing weights, see `_interrupted`."""
    from rlmath.data.tokenizer import load_tokenizer
    from rlmath.rewards.reward_manager import open_reward_workers
    from rlmath.rollout.collector import CollectGroups, Collector
    from rlmath.rollout.sampling import RolloutSeed, training_sampling

    engine, mesh = _open(folder, engine_size)
    engine.version = 3
    pool = open_reward_workers(RewardConfig()) if mesh.is_engine_leader else None
    collector = Collector(engine, mesh, load_tokenizer(str(folder)), ROLLOUT, RewardConfig(), pool)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    keys_before = store.num_keys()
    dist.barrier()
    sampling = training_sampling(ROLLOUT)
    rollouts = [
        collector.collect(CollectGroups(PROMPTS[:count], sampling, RolloutSeed(1, 0), ""))
        for count in prompt_counts
    ]
    dist.barrier()
    keys_after = store.num_keys()
    dist.barrier()
    if pool is not None:
        pool.close()
    hashed = _hashed(engine, mesh, folder)
    temperatures = (0.0, 1.0) if mesh.engine_size == mesh.world_size else ()
    slices = {temperature: _in_slices(engine, temperature) for temperature in temperatures}
    interrupted = _interrupted(engine, mesh, folder)
    engine.close()
    return {
        "interrupted": interrupted,
        "hashed": hashed,
        "slices": slices,
        "groups": [rollout.groups for rollout in rollouts],
        "engines": [rollout.engines for rollout in rollouts],
        "new_keys": keys_after - keys_before,
    }


def _hashed(engine: Any, mesh: Mesh, folder: Path) -> dict[str, list[ScoredGroup]]:
    """Rollouts at temperature 1 by the names of `SEEDS`.

    A hash of text and solutions rewards them."""
    from rlmath.data.tokenizer import load_tokenizer
    from rlmath.rewards.reward_manager import open_reward_workers
    from rlmath.rollout.collector import CollectGroups, Collector
    from rlmath.rollout.sampling import RolloutSeed, training_sampling

    pool = open_reward_workers(HASHED) if mesh.is_engine_leader else None
    collector = Collector(engine, mesh, load_tokenizer(str(folder)), ROLLOUT, HASHED, pool)
    sampling = replace(training_sampling(ROLLOUT), temperature=1.0)
    groups = {}
    for name, (run_seed, step) in SEEDS.items():
        collection = CollectGroups(PROMPTS, sampling, RolloutSeed(run_seed, step), "")
        groups[name] = collector.collect(collection).groups
        dist.barrier()
    if pool is not None:
        pool.close()
    return groups


def _in_slices(engine: Any, temperature: float) -> tuple[Sampled, Sampled]:
    """A completion of each prompt, whole and in slices."""
    from rlmath.rollout.sampling import RolloutSeed, group_requests, training_sampling

    sampling = replace(training_sampling(ROLLOUT), samples=1, temperature=temperature)
    requests = [row[0] for row in group_requests(PROMPTS, sampling, RolloutSeed(1, 0))]
    return whole_and_in_slices(engine, requests, SLICE)


@dataclass
class Interrupted:
    """What a `RunningCompletions` did."""

    whole: dict[Key, Completion]
    """The same completions, never interrupted."""
    ended: dict[Key, Completion]
    scored: dict[Key, Completion]
    """What was handed to be scored."""
    held: dict[Key, int]
    """Tokens of those that were interrupted."""
    left: int
    """What was in flight then."""
    usage: Usage
    given_up: str
    """The error where vLLM gives a completion up."""


def _interrupted(engine: Any, mesh: Mesh, folder: Path) -> Interrupted:
    """Completions of as many prompts as the engine has places, under changing weights.

    Weights that are new only by name come after `KEPT_AFTER` steps, and again, while the
    completions are interrupted, after `INTERRUPTED_AFTER` more."""
    from rlmath.data.tokenizer import load_tokenizer
    from rlmath.rollout.running_completions import Weights, _Decoding
    from rlmath.rollout.sampling import RolloutSeed, group_requests, training_sampling

    sampling = replace(training_sampling(ROLLOUT), samples=1, temperature=1.0)
    prompts = PROMPTS[: ROLLOUT.max_num_seqs]
    requests = [row[0] for row in group_requests(prompts, sampling, RolloutSeed(1, 0))]
    whole = completions_of(engine, requests)
    scored: dict[Key, Completion] = {}

    def score(request: Request, completion: Completion) -> None:
        scored[request.key] = completion

    tokenizer = load_tokenizer(str(folder)) if mesh.is_engine_leader else None
    running = engine.running_completions(step=0, tokenizer=tokenizer, score=score)
    for request in requests:
        running.begin(request)
    ended = [ending for _ in range(KEPT_AFTER) for ending in running.step()]
    running.keep_tokens()
    running.weights = Weights(4, 1)
    ended += [ending for _ in range(INTERRUPTED_AFTER) for ending in running.step()]
    with running.interrupted() as in_flight:
        token_counts = {request.key: len(request.so_far.token_ids) for request in in_flight}
        remaining = len(running) + running.busy
        running.weights = Weights(5, 2)
    while running.busy:
        ended += running.step()
    try:
        running._end(_Decoding(requests[0]), "abort")
        given_up = ""
    except RuntimeError as error:
        given_up = str(error)
    completions = {ending.request.key: ending.completion for ending in ended}
    return Interrupted(
        whole,
        completions,
        scored,
        held=token_counts,
        left=remaining,
        usage=running.usage,
        given_up=given_up,
    )
