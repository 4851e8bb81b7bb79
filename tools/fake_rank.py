"""Memory of a rank of a GPU run, counted without a GPU, beside the memory plan.

The real Megatron-Core runs on fake tensors.

python tools/fake_rank.py --config configs/areal/32b_n16.yaml --ranks 128 --rank 96 [--json]

The rank's actor and reference are built in one process, whatever the number of ranks, and it
computes log-probs, those of the reference, and a minibatch through the pipeline's schedule with its
optimizer step; offloads what the settings say ("generate"); and plans a weight sync into engines
that live in the same ranks. Every line has a phase, a part of it, what the plan says and what was
counted (GiB): first memory, then what a group of ranks exchanges, by operation with how many there
were. Transformer Engine's layers are stand-ins (tools/fake_cuda.py); with
policy.transformer_impl=local all layers are real. Of the model only config.json is read.

It exits with 1 where a phase holds more or less than the plan by more than --tolerance, and with 2
for a mistake in the settings.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from rlmath.algorithms.types import Sample
from rlmath.cli.plan_memory import MISTAKE, NOT_NEEDED, checked_shapes
from rlmath.config.length_curriculum import with_longest_lengths
from rlmath.config.load import load_config, make_parser
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, MemoryConfig
from rlmath.config.terminal import escape_terminal
from rlmath.data.packing import MicroBatch, pack
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.planning.memory_estimate import (
    ENGINE_PARTS,
    MemoryPlan,
    Target,
    mesh_of,
    plan_rank,
    training_ranks,
)
from rlmath.planning.memory_fit import GIB
from rlmath.planning.parallelism import ranks_or_least
from rlmath.planning.planner.cluster import RANKS_PER_NODE
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes, cell_of, plan_sync, rank_rounds
from rlmath.rollout.weight_sync.shard_layouts import training_layout
from rlmath.rollout.weight_sync.transport import elements
from tools import fake_cuda

DIFFERS = 1
PARTS_OF_A_PASS = ("activations", "logits", "working")


@dataclass(frozen=True)
class Row:
    """A part of a phase (bytes)."""

    phase: str
    part: str
    planned: float | None
    counted: int
    messages: int | None = None
    """How many there were, of an operation that ranks exchange something by; it has no plan."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 where the plan holds."""
    escape_terminal()
    parser = make_parser("Count what a rank of a GPU run holds, on fake tensors.")
    parser.add_argument(
        "--ranks",
        type=int,
        help="ranks of the run; without it those of parallel.data, else the least",
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank that is counted (default 0)")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="of a phase's sum (default 0.02)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object for each line, in bytes"
    )
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides, stand_ins=NOT_NEEDED)
        ranks = ranks_or_least(config.parallel, config.rollout, arguments.ranks)
        shapes = checked_shapes(config, ranks)
        shape = shapes.policy
        trainers = training_ranks(ranks, config.rollout.ranks)
        if not 0 <= arguments.rank < trainers:
            raise ValueError(
                f"--rank is {arguments.rank}; needed: 0 to {trainers - 1}, a rank that trains"
            )
        config = with_longest_lengths(config)
        mesh = mesh_of(config.parallel, config.rollout, ranks, rank=arguments.rank)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    target = Target("cuda", "GPU", None, local_layers=config.policy.transformer_impl == "local")
    held_bytes, sent = count(config, shape, mesh, target.local_layers)
    plan = plan_rank(config, shapes, mesh, target=target)
    rows = compare(plan, held_bytes) + rows_of_sent(sent)
    if not config.rollout.ranks:
        rows += compare_sync(config, shape, mesh, target=target, plan=plan)
    for row in rows:
        print(json.dumps(asdict(row)) if arguments.json else line(row))
    sums = [(row.planned, row.counted) for row in rows if row.part == "all"]
    return (
        DIFFERS
        if any(abs(counted - planned) > arguments.tolerance * planned for planned, counted in sums)
        else 0
    )


def line(row: Row) -> str:
    """A row as a line for a terminal."""
    planned = f"{row.planned / GIB:>9.3f}" if row.planned is not None else f"{row.messages:>8}x"
    difference = f"{(row.counted - row.planned) / row.planned:>+8.1%}" if row.planned else ""
    return (
        f"{row.phase:<9} {row.part:<34} {planned} {row.counted / GIB:>9.3f} {difference}".rstrip()
    )


def compare(plan: MemoryPlan, counted: dict[str, dict[str, int]]) -> list[Row]:
    """Rows by phase: parts that stay, what the pass takes beside, and all."""
    rows = []
    for phase, parts in counted.items():
        planned = {
            part: size for part, size in plan.phases[phase].items() if part not in ENGINE_PARTS
        }
        planned["pass"] = sum(planned.pop(part, 0) for part in PARTS_OF_A_PASS)
        rows += [
            Row(phase, part, planned.get(part, 0), counted=size) for part, size in parts.items()
        ]
        rows.append(Row(phase, "all", sum(planned.values()), counted=sum(parts.values())))
    return rows


def rows_of_sent(counted: dict[str, dict[tuple[str, str], list[int]]]) -> list[Row]:
    """Rows of every operation of a group of ranks, by phase; the memory plan has none of them."""
    return [
        Row(phase, f"{group}: {operation}", None, counted=size, messages=number)
        for phase, operations in counted.items()
        for (group, operation), (number, size) in operations.items()
    ]


def compare_sync(
    config: Config, shape: ModelShape, mesh: Mesh, target: Target, plan: MemoryPlan
) -> list[Row]:
    """Rows of a weight sync: the rank's buckets, and what ranks receive from others.

    The plan has the largest buckets that any rank may need. What is received is the mean over the
    ranks that exchange with this one."""
    layout = training_layout(shape.num_layers, mesh, config.parallel)
    bucket = bucket_bytes(config.sync.bucket_mib, target.kind, mesh.world_size)
    ranks_per_node = min(mesh.world_size, RANKS_PER_NODE)
    sync = plan_sync(
        shape,
        layout,
        mesh,
        element_bytes=target.itemsize,
        bucket_bytes=bucket,
        ranks_per_node=ranks_per_node,
    )
    ranks = cell_of(mesh, ranks_per_node)
    rounds = rank_rounds(sync, mesh.rank)
    largest_buckets = [
        max(sum(map(elements, way.values())) for way in ways)
        for ways in (
            [sync_round.sends for sync_round in rounds],
            [sync_round.receives for sync_round in rounds],
        )
    ]
    return [
        Row(
            "sync",
            "buckets",
            plan.phases["sync"].get("sync_buffers", 0),
            counted=2 * sum(largest_buckets) * target.itemsize,
        ),
        Row(
            "sync",
            "received, mean",
            None,
            counted=sum(map(sync.bytes_received, ranks)) // len(ranks),
            messages=len(rounds),
        ),
    ]


# ---------------------------------------------------------------- counting


def count(
    config: Config, shape: ModelShape, mesh: Mesh, local_layers: bool
) -> tuple[dict[str, dict[str, int]], dict[str, dict[tuple[str, str], list[int]]]]:
    """Bytes that the rank holds by phase and part, and what it sends.

    What it sends is by phase, group and operation: (number, bytes)."""
    fake_cuda.join_fake_group(mesh.rank, mesh.world_size)
    head_dtype = torch.float32 if config.policy.head_dtype else None
    device = Device(
        "cuda",
        torch.device("cpu"),
        "fake",
        params_dtype=torch.bfloat16,
        local_layers=local_layers,
        head_dtype=head_dtype,
    )
    batches = full_batches(config, mesh)
    sent = fake_cuda.Sent()
    patch_gpu_path(shape, device, sent)
    from rlmath.models.build import build_actor, build_reference
    from rlmath.models.megatron import start_megatron
    from rlmath.models.offload import training_sets

    memory = fake_cuda.FakeBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), memory, sent:
        start_megatron(mesh, device, 1, timeout_seconds=1800)
        sent.groups = group_names()
        actor = build_actor(
            config, shape, mesh, device=device, total_updates=10, stop_token_ids=(0,)
        )
        reference = None
        if config.algorithm.kl_coef > 0:
            reference = build_reference(
                config, shape, mesh, device=device, stop_token_ids=(0,), actor=actor
            )
        learn = actor.learner.learn
        learn(batches, None, None, True)  # Adam's state is there afterwards
        gc.collect()
        bytes_by_part = resident(actor, reference, device)
        parts = dict(bytes_by_part)
        if config.memory.offload_reference:
            parts.pop("reference", None)
        bytes_by_phase = {}
        exchanged = {}
        sent.pop()
        with memory.most_beside() as peaks:
            old_logprobs = actor.forward_backward.logprobs(batches)
        bytes_by_phase["logprobs"], exchanged["logprobs"] = parts | {"pass": peaks[0]}, sent.pop()
        reference_logprobs = None
        if reference is not None:
            with memory.most_beside() as peaks:
                reference_logprobs = reference.logprobs(batches)
            bytes_by_phase["reference"] = bytes_by_part | {"pass": peaks[0]}
            sent.pop()
        with memory.most_beside() as peaks:
            learn(batches, old_logprobs, reference_logprobs)
        bytes_by_phase["update"], exchanged["update"] = parts | {"pass": peaks[0]}, sent.pop()
        if not config.rollout.ranks:
            sets = training_sets(actor, reference, config.memory, device=of_fake_storages(device))
            sets.offload("gradients", "optimizer", "parameters", "reference")
            bytes_by_phase["generate"] = resident(actor, reference, device)
    return bytes_by_phase, exchanged


def group_names() -> dict[str, str]:
    """Names of Megatron's groups by their group names.

    Groups of one rank send nothing."""
    from megatron.core import parallel_state as groups

    groups_by_name = {
        "tensor": groups.get_tensor_model_parallel_group(),
        "pipeline": groups.get_pipeline_model_parallel_group(),
        "context": groups.get_context_parallel_group(),
        "expert_tensor": groups.get_expert_tensor_parallel_group(),
        "expert": groups.get_expert_model_parallel_group(),
        "embedding": groups.get_embedding_group(False),
        "expert_data": groups.get_expert_data_parallel_group(),
        "data": groups.get_data_parallel_group(with_context_parallel=True),
    }
    return {
        group.group_name: name
        for name, group in groups_by_name.items()
        if isinstance(group, dist.ProcessGroup)
    }


def resident(actor: Any, reference: Any, device: Device) -> dict[str, int]:
    """Bytes by part of what outlives a pass.

    They are those of the sets that a run may offload, and of what stays in any case."""
    from megatron.core.parallel_state import get_global_memory_buffer

    from rlmath.models.offload import training_sets

    offloads_all = MemoryConfig(
        offload_gradients=True,
        offload_optimizer=True,
        offload_parameters=True,
        offload_reference=True,
    )
    return training_sets(actor, reference, offloads_all, device=of_fake_storages(device)).nbytes | {
        "gather_buffer": sum(
            tensor.nbytes for tensor in get_global_memory_buffer().buffer.values()
        ),
        "dummy_gradients": sum(tensor.nbytes for tensor in fake_cuda.dummy_gradients.values()),
    }


def of_fake_storages(device: Device) -> Device:
    """The device for sets of storages.

    There is no driver that could pin the host's memory."""
    return replace(device, kind="cpu", torch_device=torch.device("meta"))


def full_batches(config: Config, mesh: Mesh) -> list[MicroBatch]:
    """Full micro-batches, as many as a stage may have in flight.

    Each has all the tokens that the settings allow, in four segments of like length."""
    tokens = config.policy.max_tokens_per_microbatch
    segments = 4
    length = tokens // segments
    prompt = min(config.data.max_prompt_tokens, length // 2)
    completion = length - prompt
    sample = Sample((1,) * prompt, (2,) * completion, (-0.5,) * completion, advantage=1.0)
    multiple = mesh.tensor if config.parallel.sequence else 1
    return [pack([sample] * segments, range(segments), multiple)] * number_of_batches(mesh)


def number_of_batches(mesh: Mesh) -> int:
    return 2 * mesh.pipeline * mesh.virtual_pipeline


def patch_gpu_path(shape: ModelShape, device: Device, sent: fake_cuda.Sent) -> None:
    """Replace all that needs CUDA, weights on disk or Transformer Engine."""
    import megatron.core.pipeline_parallel.p2p_communication as p2p
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    import megatron_patches
    from megatron_patches import linear
    from rlmath.models import attention, build, forward_backward, megatron, output_layer

    fake_cuda.answer_for_values()
    linear.patch = lambda: None
    megatron_patches.apply("cpu")
    layers.fused_weight_gradient_mlp_cuda = fake_cuda.fused_kernels()
    layers._grad_accum_fusion_available = True
    attention.CPUAttention.apply = attention.flash_over_segments
    param_and_grad_buffer._coalescing_manager = fake_cuda.coalesced
    build.load_hf_weights = lambda *arguments, **named: None
    CudaRNGStatesTracker.fork = lambda tracker, *arguments: nullcontext()
    megatron.GPTModel.to = lambda model, *arguments: model
    output_layer.float32_product = lambda hidden, weight: hidden.new_empty(
        len(hidden), len(weight), dtype=torch.float32
    )
    fake_cuda.triton_without_kernels()
    forward_backward.finish_computation = lambda device: None
    p2p._batched_p2p_ops = sent.between_stages_together
    p2p._p2p_ops = sent.between_stages
    if device.local_layers:
        return
    layers.HAVE_TE = True
    # Compiled on a GPU: nothing between their inputs and what they return.
    fused_bias_swiglu.swiglu = lambda gate_up: torch.empty_like(gate_up.chunk(2, -1)[0])
    fused_bias_swiglu.swiglu_back = lambda grad, gate_up: torch.empty_like(gate_up)
    fused_bias_swiglu.weighted_swiglu = lambda gate_up, weights: torch.empty_like(
        gate_up.chunk(2, -1)[0]
    )
    fused_bias_swiglu.weighted_swiglu_back = lambda grad, gate_up, weights: (
        torch.empty_like(gate_up),
        torch.empty_like(weights),
    )
    layers.get_dummy_wgrad = fake_cuda.dummy_gradient
    megatron.layer_spec = te_like_layers
    configure = megatron.TransformerConfig
    extra_settings = {"apply_rope_fusion": False}
    if shape.num_experts:  # all get equally many tokens: their number does not depend on values
        extra_settings |= {
            "moe_pad_expert_input_to_capacity": True,
            "moe_expert_capacity_factor": 1.0,
        }
    megatron.TransformerConfig = lambda **arguments: configure(**(arguments | extra_settings))
    rope_utils._apply_rotary_pos_emb_thd = fake_cuda.rotated


def te_like_layers(
    config: Any, local_layers: bool, chunk: int | None, separate_norms: bool = False
) -> Any:
    """The stand-ins' layers, in place of `models.megatron.layer_spec`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    norm = IdentityOp
    linear = fake_cuda.NormLinear
    if separate_norms:
        norm = fake_cuda.Norm
        linear = fake_cuda.ColumnLinear
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    attention = parts.self_attention.submodules
    attention.linear_qkv = linear
    attention.linear_proj = fake_cuda.RowLinear
    attention.core_attention = fake_cuda.Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = fake_cuda.Norm
    if config.num_moe_experts:
        parts.mlp = te_like_experts()
        parts.pre_mlp_layernorm = fake_cuda.Norm
    else:
        mlp = (
            parts.mlp.keywords["submodules"]
            if hasattr(parts.mlp, "keywords")
            else parts.mlp.submodules
        )
        mlp.linear_fc1 = linear
        mlp.linear_fc2 = fake_cuda.RowLinear
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=chunk),
        layer_norm=fake_cuda.Norm,
    )


def te_like_experts() -> Any:
    """Megatron's layer of experts with stand-ins for its products, as 0.19 has it, or 0.16."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts, moe_layer
    from megatron.core.transformer.spec_utils import ModuleSpec

    linear = {"linear_fc1": fake_cuda.ColumnGroupedLinear, "linear_fc2": fake_cuda.RowGroupedLinear}
    if hasattr(experts, "GroupedMLPSubmodules"):
        inside = partial(experts.TEGroupedMLP, submodules=experts.GroupedMLPSubmodules(**linear))
        return partial(moe_layer.MoELayer, submodules=moe_layer.MoESubmodules(experts=inside))
    inside = ModuleSpec(experts.TEGroupedMLP, submodules=MLPSubmodules(**linear))
    return ModuleSpec(moe_layer.MoELayer, submodules=moe_layer.MoESubmodules(experts=inside))


if __name__ == "__main__":
    sys.exit(main())
