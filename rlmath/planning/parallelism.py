"""Ranks of a layout, and Megatron's and the engine's rules for ranks, stages and layers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from rlmath.config.help import counted
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import ParallelConfig, PolicyConfig, RolloutConfig
from rlmath.distributed.ranks import environment_world_size, ranks_text
from rlmath.rollout.weight_sync.shard_layouts import engine_vocab_rows


def planned_ranks(parallel: ParallelConfig, rollout: RolloutConfig, ranks: int | None) -> int:
    """Ranks of the run.

    They are `ranks` where that is set, else those of `parallel.data`, of a launcher, or the least
    that the layout takes."""
    if ranks is None and "WORLD_SIZE" in os.environ:
        ranks = ranks_of_layout(parallel, rollout.ranks) or environment_world_size()
    return ranks_or_least(parallel, rollout, ranks)


def ranks_of_layout(parallel: ParallelConfig, engine_ranks: int = 0) -> int | None:
    """Ranks of a layout with `parallel.data` replicas and the engines' own (`rollout.ranks`).

    None where `parallel.data` is left open.

    >>> ranks_of_layout(ParallelConfig(data=8, tensor=4)), ranks_of_layout(ParallelConfig(data=8, tensor=4), 24)
    (32, 56)
    """
    if parallel.data is None:
        return None
    sizes = (parallel.data, parallel.tensor, parallel.context, parallel.pipeline)
    return math.prod(max(1, size) for size in sizes) + max(0, engine_ranks)


def ranks_or_least(parallel: ParallelConfig, rollout: RolloutConfig, ranks: int | None) -> int:
    """Ranks of the run.

    They are `ranks` where that is set, or those that `parallel.data` makes, or the least that the
    layout takes."""
    if ranks is not None:
        return ranks
    return ranks_of_layout(parallel, rollout.ranks) or least_ranks(parallel, rollout)


def least_ranks(parallel: ParallelConfig, rollout: RolloutConfig) -> int:
    """The least ranks that a layout takes.

    These are one replica of the model, or as many as make whole engines; with ranks of the engines'
    own, these and one replica."""
    sizes = (parallel.tensor, parallel.context, parallel.expert, parallel.expert_tensor)
    tensor, context, expert, expert_tensor = (max(1, size) for size in sizes)
    stage = math.lcm(tensor * context, expert * expert_tensor)
    replica = stage * max(1, parallel.pipeline)
    if rollout.ranks > 0:
        return replica + rollout.ranks
    return math.lcm(replica, max(1, rollout.tensor_parallel))


def roles(world_size: int, engine_ranks: int) -> str:
    """The roles of ranks where not all train and generate; else "".

    >>> roles(3, engine_ranks=2)
    'rank 0 trains, ranks 1-2 generate'
    """
    trainers = world_size - engine_ranks
    if not engine_ranks:
        return ""
    train = ranks_text(range(trainers))
    generate = ranks_text(range(trainers, world_size))
    return f"{train} train{'s' * (trainers == 1)}, {generate} generate{'s' * (engine_ranks == 1)}"


# ---------------------------------------------------------------- problems of a layout


def rank_problems(
    parallel: ParallelConfig, engine: int, world_size: int, engine_ranks: int = 0
) -> Iterator[str]:
    """Problems of the number of ranks that show without the model.

    `engine` is `rollout.tensor_parallel`, `engine_ranks` is `rollout.ranks`, and `world_size`
    counts all ranks of the run."""
    engine = max(1, engine)
    own_engine_ranks = max(0, engine_ranks)
    trainers = world_size - own_engine_ranks
    if trainers < 1:
        yield (
            f"rollout.ranks is {own_engine_ranks}, and the run has {counted(world_size, 'rank')}: "
            "none is left "
            "to "
            f"train. Start more than {own_engine_ranks}, or lower rollout.ranks; 0 lets engines "
            "live in the "
            "training ranks."
        )
    else:
        yield from _training_rank_problems(parallel, trainers, own_engine_ranks)
    if (own_engine_ranks or world_size) % engine:
        dividend = (
            f"rollout.ranks {own_engine_ranks}"
            if own_engine_ranks
            else f"the {counted(world_size, 'rank')} of this run"
        )
        change = " Or change rollout.ranks." if own_engine_ranks else ""
        yield (
            f"rollout.tensor_parallel is {engine}, which does not divide {dividend}; possible: "
            f"{_possible_sizes(own_engine_ranks or world_size)}.{change}"
        )


def _training_rank_problems(parallel: ParallelConfig, trainers: int, own: int) -> Iterator[str]:
    """Problems of `trainers` training ranks, beside `own` ranks of the engines."""
    sizes = {
        "parallel.tensor": max(1, parallel.tensor),
        "parallel.pipeline": max(1, parallel.pipeline),
    }
    if parallel.context > 1:
        sizes["parallel.context"] = parallel.context
    replica = math.prod(sizes.values())
    beside, addition = (
        (f", beside rollout.ranks {own}", f" and {own} for rollout.ranks") if own else ("", "")
    )
    if trainers % replica:
        yield (
            f"{' x '.join(sizes)} is {' x '.join(map(str, sizes.values()))} = {replica}, which "
            "does not divide the "
            f"{counted(trainers, 'rank')} that train{'s' * (trainers == 1)}{beside}. Start a "
            "multiple of "
            f"{replica}{addition}, or change them."
        )
    elif parallel.data is not None and parallel.data * replica != trainers:
        required_ranks = parallel.data * replica
        yield (
            f"parallel.data is {parallel.data}; with {' x '.join(sizes)} = {replica} it makes "
            f"{counted(required_ranks, 'rank')}, and this run has {trainers} to train{beside}. "
            "Start "
            f"{required_ranks + own}, or set "
            "parallel.data=null."
        )
    stage_ranks, remainder = divmod(trainers, max(1, parallel.pipeline))
    required_ranks = max(1, parallel.expert) * max(1, parallel.expert_tensor)
    if not remainder and stage_ranks % required_ranks:
        yield (
            f"parallel.expert x parallel.expert_tensor is {parallel.expert} x "
            f"{parallel.expert_tensor} = {required_ranks}, "
            f"which does not divide the {counted(stage_ranks, 'rank')} of a pipeline stage. "
            f"Possible: {_possible_sizes(stage_ranks)}."
        )


def layout_problems(
    parallel: ParallelConfig, engine: int, policy: PolicyConfig, shape: ModelShape
) -> Iterator[str]:
    """Problems of the model's shape, for training and for engines of so many ranks."""
    yield from split_problems(parallel, engine, shape)
    yield from expert_problems(parallel, shape)
    yield from stage_problems(parallel, policy, shape.num_layers)
    if parallel.context > 1 and shape.sliding_window is not None:
        yield (
            f"parallel.context is {parallel.context}, of a model with a sliding window of "
            f"{shape.sliding_window} "
            "tokens, which Transformer Engine's attention over context ranks does not have. Set "
            "it to 1."
        )


def expert_problems(parallel: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    """Problems of the layout of experts.

    megatron-core 0.16 does not refuse all that it computes wrongly."""
    expert = max(1, parallel.expert)
    split = max(1, parallel.expert_tensor)
    if not shape.num_experts:
        for key, ranks in (("parallel.expert", expert), ("parallel.expert_tensor", split)):
            if ranks > 1:
                yield f"{key} is {ranks}; a {shape.architecture} has no experts. Set it to 1."
        return
    yield from _must_divide(
        "parallel.expert", expert, shape.num_experts, parts="experts of a layer"
    )
    units = "feed-forward units of an expert"
    yield from _must_divide("parallel.expert_tensor", split, shape.ffn_size, parts=units)
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"parallel.tensor is {parallel.tensor}, of a model with experts; Megatron then trains "
            "with sequence "
            "parallelism only. Set parallel.sequence=true."
        )
    if expert == 1 and split != parallel.tensor:
        # Its experts would count as layers that tensor-parallel ranks compute alike, and each sees
        # tokens of its own.
        yield (
            f"parallel.tensor is {parallel.tensor} and parallel.expert_tensor {split}, with "
            "parallel.expert=1: "
            "Megatron would not add up the experts' gradients of the tensor-parallel ranks. Raise "
            "parallel.expert "
            "above 1, or set parallel.tensor to 1."
        )


def expert_tensor_problems(parallel: ParallelConfig, on_gpu: bool) -> Iterator[str]:
    """Problems of `parallel.expert_tensor`.

    Under gloo, Megatron cannot gather what different numbers of tokens give."""
    if parallel.expert_tensor > 1 and not on_gpu:
        yield (
            f"parallel.expert_tensor is {parallel.expert_tensor}; on CPU it must be 1, because "
            "gloo cannot gather the "
            "unlike numbers of tokens that the ranks of an expert have. Set it to 1, and share "
            "experts out by "
            "parallel.expert."
        )


def rotary_problems(policy: PolicyConfig, shape: ModelShape, on_gpu: bool) -> Iterator[str]:
    """Problems of rotary positions that Transformer Engine does not have.

    It rotates a part of every head, or multiplies all of it by one factor in all layers, but not
    both."""
    if (
        not on_gpu
        or policy.transformer_impl != "transformer_engine"
        or shape.rotary_magnitude == 1.0
    ):
        return
    if shape.rotary_dim is not None or shape.no_rope_layers:
        yield (
            f"the model multiplies by {shape.rotary_magnitude:.4g} what it rotates, and rotates "
            "only a part of a head, "
            "or not in all layers, which Transformer Engine does not. Set "
            "policy.transformer_impl=local."
        )


def context_problems(parallel: ParallelConfig, policy: PolicyConfig, on_gpu: bool) -> Iterator[str]:
    """Problems of context parallelism, which only Transformer Engine's attention has."""
    if parallel.context <= 1 or (on_gpu and policy.transformer_impl == "transformer_engine"):
        return
    needed = (
        "policy.transformer_impl=transformer_engine" if on_gpu else "a GPU with Transformer Engine"
    )
    yield (
        f"parallel.context is {parallel.context}; context parallelism needs {needed}. Set it to "
        "1, and fit long "
        "sequences by parallel.tensor with parallel.sequence=true or by "
        "policy.recompute_granularity=full."
    )


def split_problems(parallel: ParallelConfig, engine: int, shape: ModelShape) -> Iterator[str]:
    """Problems of sizes that must divide others.

    For Megatron all must; vLLM copies key-value heads when it has more ranks than those."""
    engine = max(1, engine)
    heads = (("attention heads", shape.num_heads),)
    strict = (*heads, ("feed-forward units", shape.ffn_size))
    # Experts have a tensor-parallel size of their own in training, not in the engine.
    trained = heads if shape.num_experts else strict
    divisors = (
        ("parallel.tensor", parallel.tensor, (*trained, ("key-value heads", shape.num_kv_heads))),
        ("rollout.tensor_parallel", engine, strict),
    )
    for key, ranks, parts in divisors:
        possible = _possible_sizes(math.gcd(*(size for _, size in parts)))
        for name, size in parts:
            if size % max(1, ranks):
                yield (
                    f"{key} is {ranks}; it must divide the model's {size} {name}. Possible: "
                    f"{possible}."
                )
    kv_heads = shape.num_kv_heads
    if kv_heads % engine and engine % kv_heads:
        yield (
            f"rollout.tensor_parallel is {engine}: vLLM can neither split nor copy the model's "
            f"{kv_heads} "
            f"key-value heads evenly; needed: a divisor or a multiple of {kv_heads}."
        )
    elif (rows := engine_vocab_rows(shape, 1)) % engine:
        yield (
            f"rollout.tensor_parallel is {engine}: vLLM fills the model's vocabulary of "
            f"{shape.vocab_size} up to "
            f"{rows} rows and must split them evenly. Possible: "
            f"{_possible_sizes(math.gcd(rows, shape.num_heads, shape.ffn_size))}."
        )


def stage_problems(parallel: ParallelConfig, policy: PolicyConfig, layers: int) -> Iterator[str]:
    """Problems of the layers of pipeline stages and their chunks, and of what they recompute."""
    pipeline = max(1, parallel.pipeline)
    virtual = max(1, parallel.virtual_pipeline)
    if pipeline == 1:
        problems = []
    elif _given_stages(parallel):
        problems = list(_uneven_problems(_given_stages(parallel), pipeline, virtual, layers=layers))
    else:
        problems = list(_even_problems(pipeline, virtual, layers))
    yield from problems or _recompute_problems(policy, chunk_sizes(parallel, layers))


def chunk_sizes(parallel: ParallelConfig, layers: int) -> list[int]:
    """The different numbers of layers that model chunks have, in a layout that has no problems.

    >>> chunk_sizes(ParallelConfig(pipeline=4, virtual_pipeline=2, first_stage_layers=2), layers=14)
    [1, 2]
    """
    pipeline = max(1, parallel.pipeline)
    given_stages = _given_stages(parallel)
    if pipeline == 1:
        return [layers]
    other_layers = layers - sum(given_stages.values())
    other_stages = pipeline - len(given_stages)
    stages = {*given_stages.values(), *([other_layers // other_stages] if other_stages else [])}
    return sorted(stage // max(1, parallel.virtual_pipeline) for stage in stages)


def _given_stages(parallel: ParallelConfig) -> dict[str, int]:
    stages = {
        "parallel.first_stage_layers": parallel.first_stage_layers,
        "parallel.last_stage_layers": parallel.last_stage_layers,
    }
    return {key: layers for key, layers in stages.items() if layers is not None}


def _even_problems(pipeline: int, virtual: int, layers: int) -> Iterator[str]:
    """Problems of stages that all have the same number of layers."""
    for problem in _must_divide("parallel.pipeline", pipeline, layers, parts="layers of the model"):
        yield f"{problem} Or let parallel.first_stage_layers or parallel.last_stage_layers differ."
    if layers % pipeline == 0:
        stage = layers // pipeline
        yield from _must_divide(
            "parallel.virtual_pipeline", virtual, stage, parts="layers of a pipeline stage"
        )


def _uneven_problems(
    given: dict[str, int], pipeline: int, virtual: int, layers: int
) -> Iterator[str]:
    """Problems of a first or last stage that has a number of layers of its own."""
    keys = " + ".join(given)
    taken = sum(given.values())
    other_stages = pipeline - len(given)
    other_layers = layers - taken
    chunks = other_stages * virtual
    indivisible = any(stage % virtual for stage in given.values())
    if indivisible or (other_layers < chunks or other_layers % chunks if chunks else other_layers):
        yield (
            f"{keys} is {taken}, which leaves {max(0, other_layers)} of the model's {layers} "
            "layers to "
            f"{other_stages} other pipeline "
            "stages; needed: the same number for each of these, and for every stage a multiple of "
            f"parallel.virtual_pipeline {virtual}. Change {keys}, or set one to null."
        )


def _recompute_problems(policy: PolicyConfig, chunks: list[int]) -> Iterator[str]:
    """Problems of `policy.recompute_num_layers`.

    In megatron-core 0.16, "uniform" runs past the end of a chunk that it does not divide."""
    number = policy.recompute_num_layers
    if number is None or number < 1:
        return
    if policy.recompute_method == "uniform" and any(layers % number for layers in chunks):
        yield (
            f'policy.recompute_num_layers is {number}; with policy.recompute_method="uniform" it '
            "must divide the "
            f"layers of every pipeline stage or model chunk, {_listed(chunks)}. "
            f"Possible: {_possible_sizes(math.gcd(*chunks))}."
        )
    elif number > max(chunks):
        yield (
            f"policy.recompute_num_layers is {number}; no pipeline stage or model chunk has more "
            f"than {max(chunks)} "
            "layers. Lower it."
        )


def _must_divide(key: str, ranks: int, number: int, parts: str) -> Iterator[str]:
    if number % ranks:
        yield (
            f"{key} is {ranks}; it must divide the {number} {parts}. Possible: "
            f"{_possible_sizes(number)}."
        )


def divisors(number: int) -> list[int]:
    """Divisors of a number, from 1 to the number itself.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _possible_sizes(number: int) -> str:
    """Divisors up to 1024, more ranks than any matrix is shared by, as text."""
    return _listed([divisor for divisor in divisors(number) if divisor <= 1024])


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
