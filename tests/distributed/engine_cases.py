"""What the ranks do in the tests of rollout and sync."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlmath.algorithms.types import PartialCompletion, Sample
from rlmath.config.schema import NO_LORA, LoraConfig, RolloutConfig
from rlmath.data.packing import MicroBatch, pack
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.weight_sync.shard_layouts import engine_adapters, engine_shapes, training_layout
from tests.distributed.policy_cases import Case, Stage, build, by_sample, lay_out, settings
from tests.tiny_models import make_samples, shape_of

ROLLOUT = RolloutConfig(
    group_size=3, max_new_tokens=24, temperature=0.8, cpu_kv_cache_gib=0.1, progress_bar=False
)
PREFIX_BLOCK = 128
"""Tokens of a block of vLLM's KV cache on CPU: what of a prompt fills whole blocks is kept for the
next one."""
PROMPTS = {"a": (5, 6, 7), "b": (40, 41), "c": (9, 9, 9, 9, 9, 9)}


def open_engine(
    folder: Path,
    engine_size: int,
    device: Any,
    rollout: RolloutConfig = ROLLOUT,
    longest: int = 64,
    lora: LoraConfig = NO_LORA,
) -> Any:
    """An engine over the ranks of the process group, for sequences of up to `longest` tokens.

    It is asleep, as the trainer keeps it."""
    from rlmath.rollout.engine import Engine

    shape = shape_of(folder)
    mesh = Mesh(dist.get_rank(), dist.get_world_size(), 1, 1, engine_size)
    adapters = engine_adapters(shape, lora)
    engine = Engine(
        str(folder),
        rollout,
        longest,
        mesh=mesh,
        device=device,
        weight_shapes=engine_shapes(shape, engine_size, adapters),
        keeps_weights=bool(adapters),
    )
    engine.memory.sleep()
    return engine


def completions_of(engine: Any, requests: Any) -> dict[Any, Any]:
    """What an engine that is awake samples, by the keys of the requests, in their order."""
    ended = engine.running_completions().sample(requests)
    return dict(sorted((ending.request.key, ending.completion) for ending in ended))


@dataclass
class Pair:
    """A policy and the engine that follows it."""

    stage: Stage
    engine: Any
    mesh: Mesh
    sync: Any

    def generate(self, requests: list[Any]) -> dict[Any, Any]:
        """Wake, sync, generate, sleep."""
        self.engine.memory.wake_weights()
        self.sync.run(check=True)
        self.engine.set_weight_version(self.stage.actor.learner.updates)
        self.engine.memory.wake_kv_cache()
        generated = completions_of(self.engine, requests)
        self.engine.memory.sleep()
        return generated


def pair(stage: Stage, engine: Any, engine_size: int, bucket_bytes: int = 40_000) -> Pair:
    """Buckets are small, so that there are many rounds."""
    from rlmath.rollout.weight_sync.weight_sync import WeightTransfer

    mesh = replace(stage.mesh, engine_size=engine_size)
    parallel = stage.config.parallel
    layers = stage.shape.num_layers
    layout = training_layout(layers, mesh, parallel)
    sync = WeightTransfer(
        stage.actor.chunks,
        stage.shape,
        layout,
        mesh=mesh,
        device=stage.device,
        weights=engine.weights,
        bucket_bytes=bucket_bytes,
        lora=stage.config.lora,
        keeps_weights=engine.memory.keeps_weights,
    )
    return Pair(stage, engine, mesh, sync)


def _open(folder: Path, case: Case, engine_size: int) -> Pair:
    stage = build(folder, case)
    engine = open_engine(folder, engine_size, stage.device, lora=stage.config.lora)
    return pair(stage, engine, engine_size)


def _requests(step: int, min_new_tokens: int, engine_index: int = 0, engines: int = 1) -> list[Any]:
    from rlmath.rollout.sampling import Request, request_seed

    return [
        Request(
            (p, g), tokens, request_seed(1, step, name, g), min_new_tokens, ROLLOUT.max_new_tokens
        )
        for p, (name, tokens) in enumerate(PROMPTS.items())
        if p % engines == engine_index
        for g in range(3)
    ]


def _pack_all(samples: list[Sample], mesh: Mesh) -> list[MicroBatch]:
    """All samples on every data-parallel rank, in as few micro-batches as the layout takes."""
    count = mesh.microbatch_multiple
    return [pack(samples, range(start, len(samples), count), mesh.tensor) for start in range(count)]


def mismatch_after_updates(folder: Path, case: Case, engine_size: int, updates: int) -> list[float]:
    """Largest difference between the engine's and the policy's log-probs.

    Measured at the start and after every update; empty off the last stage."""
    both = _open(folder, replace(case, lr=1.0), engine_size)
    largest = mismatch(both, case, updates)
    both.engine.close()
    return largest


def mismatch_of_layouts(
    folder: Path, cases: list[Case], engine_size: int, updates: int
) -> list[list[float]]:
    """The same for several layouts of the policy, one after the other, beside one engine."""
    from rlmath.models.megatron import stop_megatron

    device = open_device("cpu")
    init_process_group(device, 120.0)
    lora = settings(folder, cases[0]).lora
    engine = open_engine(folder, engine_size, device, lora=lora)
    mismatches = []
    for case in cases:
        stage = lay_out(folder, replace(case, lr=1.0), device)
        mismatches.append(mismatch(pair(stage, engine, engine_size), case, updates))
        stop_megatron()
    engine.close()
    return mismatches


Sampled = dict[tuple[int, int], tuple[list[int], list[float]]]
"""Tokens and log-probs of completions, by the keys of their requests."""


def whole_and_in_slices(
    engine: Any, requests: list[Any], slice_tokens: int
) -> tuple[Sampled, Sampled]:
    """The completions of an engine that is awake, sampled in one piece and in slices.

    For each slice the engine prefills what is sampled so far, without cached blocks of the slice
    before."""
    whole = completions_of(engine, requests)
    parts = {request.key: PartialCompletion() for request in requests}
    unfinished = list(requests)
    while unfinished:
        engine.reset_prefix_cache()
        slices = [
            replace(request, so_far=parts[request.key], slice_tokens=slice_tokens)
            for request in unfinished
        ]
        parts |= completions_of(engine, slices)
        unfinished = [
            request for request in unfinished if isinstance(parts[request.key], PartialCompletion)
        ]
    assert all(whole[key].finish_reason == part.finish_reason for key, part in parts.items())
    assert all(whole[key].segments == part.segments for key, part in parts.items())
    return _tokens(whole), _tokens(parts)


def _tokens(completions: dict[Any, Any]) -> Sampled:
    return {
        key: (list(completion.token_ids), list(completion.logprobs))
        for key, completion in completions.items()
    }


def greedy_in_slices(folder: Path, device_kind: str, slice_tokens: int) -> dict[str, Any]:
    """Greedy completions, whole and in slices.

    Of those that differ, in "ties", by how much the log-probs of the two tokens differ where the
    first does (nats), as the engine reads them behind the same tokens."""
    from rlmath.rollout.sampling import Request

    stage = build(folder, Case(device=device_kind))
    engine = open_engine(folder, 1, stage.device)
    both = pair(stage, engine, 1)
    engine.memory.wake_weights()
    both.sync.run()
    engine.memory.wake_kv_cache()
    prompts = [(n + 3, 50, 51) for n in range(24)]
    requests = [
        Request((p, 0), prompt, 0, 0, ROLLOUT.max_new_tokens, 0.0)
        for p, prompt in enumerate(prompts)
    ]
    whole, slices = whole_and_in_slices(engine, requests, slice_tokens)
    ties = {}
    for key, (tokens, _) in whole.items():
        sliced_tokens = slices[key][0]
        first_difference = next(
            (n for n, (a, b) in enumerate(zip(tokens, sliced_tokens, strict=False)) if a != b), None
        )
        if first_difference is not None:
            behind = [*prompts[key[0]], *tokens[:first_difference]]
            a, b = engine.score(
                [[*behind, tokens[first_difference]], [*behind, sliced_tokens[first_difference]]]
            )
            ties[key] = abs(a[-1] - b[-1])
    engine.close()
    return {"whole": whole, "slices": slices, "ties": ties}


def engine_settings(folder: Path, device_kind: str) -> dict[str, bool]:
    """Two settings of one engine.

    Whether it draws the noise of all its requests at once, and whether FlashInfer reduces over its
    ranks, alone or in one kernel with a norm."""
    from rlmath.rollout import engine

    device = open_device(device_kind)
    init_process_group(device, 120.0)
    llm = open_engine(folder, 1, device)._llm
    passes = llm.llm_engine.vllm_config.compilation_config.pass_config
    from vllm import envs  # after `prepare_environment`

    return {
        "one kernel": engine.samples_in_one_kernel(llm),
        "flashinfer reduces": bool(envs.VLLM_ALLREDUCE_USE_FLASHINFER),
        "one kernel with a norm": bool(passes.fuse_allreduce_rms),
    }


def mismatch(both: Pair, case: Case, updates: int) -> list[float]:
    stage = both.stage
    mesh = both.mesh
    prompts = list(PROMPTS.values())
    largest = []
    for step in range(updates + 1):
        generated = both.generate(_requests(step, case.min_new_tokens))
        assert all(
            len(completion.token_ids) >= case.min_new_tokens for completion in generated.values()
        )
        samples = [
            Sample(prompts[p], completion.token_ids, completion.logprobs, 1.0)
            for (p, _), completion in generated.items()
        ]
        batches = _pack_all(samples, mesh)
        policy = stage.actor.forward_backward.logprobs(batches)
        if mesh.is_last_stage:
            policy_logprobs = by_sample(batches, policy)
            largest.append(
                max(
                    abs(a - b)
                    for index, sample in enumerate(samples)
                    for a, b in zip(policy_logprobs[index], sample.behaviour_logprobs, strict=True)
                )
            )
        if step < updates:
            learned = stage.actor.learner.learn(
                _pack_all(make_samples(8, seed=step), mesh), None, None
            )
            assert learned.discarded is None
            assert stage.actor.learner.updates == step + 1 > both.engine.version
    return largest


def old_prefixes(folder: Path) -> dict[str, Any]:
    """A prompt longer than a block of the KV cache, sampled before and after updates of the policy.

    Prefixes of old weights are dropped by `set_weight_version`, where the engine was awake all the
    time, and by sleep: the largest difference between the engine's log-probs and the policy's after
    each, after an update without either, and then by completions that share no blocks with those of
    older weights."""
    from rlmath.rollout.sampling import Request

    stage = build(folder, Case(lr=1.0))
    longest = 2 * PREFIX_BLOCK
    engine = open_engine(folder, 1, stage.device, longest=longest)
    both = pair(stage, engine, 1)
    prompt = tuple(3 + (7 * n) % 90 for n in range(longest - ROLLOUT.max_new_tokens))
    requests = [Request((0, g), prompt, g, 0, ROLLOUT.max_new_tokens) for g in range(2)]
    vllm = engine._llm.llm_engine
    assert vllm.vllm_config.cache_config.enable_prefix_caching
    report: dict[str, Any] = {
        "block": vllm.vllm_config.cache_config.block_size,
        "prompt": len(prompt),
    }

    def difference(keeps_cache: bool = False) -> float:
        ended = engine.running_completions(keeps_cache=keeps_cache).sample(requests)
        generated = [ending.completion for ending in ended]
        samples = [
            Sample(prompt, completion.token_ids, completion.logprobs, 1.0)
            for completion in generated
        ]
        batches = _pack_all(samples, stage.mesh)
        policy_logprobs = by_sample(batches, stage.actor.forward_backward.logprobs(batches))
        pairs = [
            zip(policy_logprobs[i], sample.behaviour_logprobs, strict=True)
            for i, sample in enumerate(samples)
        ]
        return max(abs(a - b) for row in pairs for a, b in row)

    def learn(seed: int) -> None:
        learned = stage.actor.learner.learn(
            _pack_all(make_samples(8, seed=seed), stage.mesh), None, None
        )
        assert learned.discarded is None

    engine.memory.wake_weights()
    both.sync.run()
    engine.memory.wake_kv_cache()
    report["first"] = difference()
    report["again"] = difference()
    learn(0)
    both.sync.run()
    engine.set_weight_version(stage.actor.learner.updates)
    report["with a new version"] = difference()
    learn(1)
    engine.memory.sleep()
    engine.memory.wake_weights()
    both.sync.run()
    engine.memory.wake_kv_cache()
    report["slept"] = difference()
    learn(2)
    both.sync.run()
    report["nothing dropped"] = difference()
    engine.version = stage.actor.learner.updates
    report["nothing shared"] = difference(keeps_cache=True)
    engine.close()
    return report
