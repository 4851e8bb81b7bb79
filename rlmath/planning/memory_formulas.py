"""Bytes of one forward and backward pass, and of a vLLM engine on one of its ranks.

**Passes.** The counts of the local layers were taken from torch's operations one by one and are
tested against measured storages. Those of Transformer Engine's layers follow from what its modules
save for the backward pass, and agree with Megatron's own formula (arXiv:2205.05198) in what the two
have in common. The experts of all ranks are taken to have like numbers of tokens, and sequences to
be of like length: where they differ, our attention pads those of one bucket by up to a third.

**Engine.** On GPU `rollout.memory_share` of the device is what vLLM takes for itself in all; what a
trial run leaves of it becomes the KV cache (vLLM 0.32, `gpu_worker.determine_available_memory`).
The CUDA context and NCCL's first buffers are there before and come on top.
"""

# Elements are numbers in the format of the parameters: 4 bytes on CPU, 2 on GPU.

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from rlmath.checkpoint.hf.weight_map import (
    adapter_rules,
    buffer_rank,
    padded_vocab,
    shard_shape,
)
from rlmath.config.model_shape import ModelShape, expert_number_bytes
from rlmath.config.schema import NO_LORA, LoraConfig, PolicyConfig, RolloutConfig
from rlmath.models.scratch_sizes import (
    CHUNK_BYTES,
    CHUNKS_HELD,
    ROW_BYTES,
    TEACHER_BLOCK_BYTES,
    TEACHER_BLOCKS_HELD,
    flash_takes,
)
from rlmath.rollout.weight_sync.shard_layouts import (
    engine_adapters,
    engine_shapes,
    engine_vocab_rows,
)

FLOAT32_BYTES = 4
BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
"""Tokens of one block of the KV cache."""


# ---------------------------------------------------------------- a forward and backward pass


@dataclass(frozen=True)
class StageWork:
    """Work of one pipeline stage, and its formats."""

    chunk_layers: int
    """Layers of one model chunk; all chunks of a stage have the same number."""
    in_flight: int
    """Most forward passes of a chunk whose backward pass is still to come."""
    has_embedding: bool
    has_head: bool
    pipelined: bool
    """Whether there are other stages to exchange hidden states with."""
    tokens: int
    """Tokens of one micro-batch on this rank."""
    tensor: int
    sequence: bool
    """Whether norms and residuals are split over the tensor-parallel ranks."""
    itemsize: int
    """Bytes of an element."""
    head_itemsize: int
    """Bytes of a logit."""
    device_kind: str
    local_layers: bool
    """Megatron's local layers with our norm and attention; else Transformer Engine's."""
    chunks: int = 1
    """Model chunks of the stage."""
    expert_tensor: int = 1
    """Ranks that share an expert's matrices, and its tokens."""
    lora: LoraConfig = NO_LORA

    def keeps_inputs(self, part: str) -> bool:
        """Whether gradients need the inputs of the linear layers of "attention" or "mlp".

        These are gradients of weights or of adapters."""
        return self.lora.rank == 0 or self.lora.target in ("all", part)


@dataclass(frozen=True)
class PassBytes:
    """Bytes of one pass at its fullest moment."""

    activations: int
    """Kept for the backward passes to come; 0 without gradients."""
    logits: int
    """The logits, which become their own gradient; 0 off the last stage."""
    working: int
    """Bytes held beside these at the fullest moment.

    These are recomputed activations, gradients on their way and chunks of logits."""


def in_flight(pipeline: int, pipeline_rank: int, virtual: int) -> int:
    """Most forward passes of one model chunk that are held for their backward pass.

    By Megatron's schedules, 1F1B and interleaved, these are the warm-up passes and the next; fewer
    where a minibatch has fewer micro-batches.

    >>> [in_flight(4, stage, 1) for stage in range(4)]
    [4, 3, 2, 1]
    """
    behind = pipeline - pipeline_rank - 1
    return behind + 1 if virtual == 1 else 2 * behind + (virtual - 1) * pipeline + 1


def hidden_elements(shape: ModelShape, work: StageWork) -> int:
    """Elements of one token's hidden state on this rank."""
    return shape.hidden_size // (work.tensor if work.sequence else 1)


def layer_elements(shape: ModelShape, work: StageWork, selective: bool = False) -> int:
    """Elements of one token that a layer keeps for its backward pass, beside the layer's input.

    With `selective` (`models.megatron.selective_modules`) the MLP's are recomputed, of local layers
    the attention's. A norm keeps its input (the first norm's is the output of the layer before) and
    its output. An MLP keeps gate and up (2), and silu(gate) up; a local expert keeps that before
    and after it is weighted. A token sent to an expert also keeps its hidden state as the expert
    gets it, and for a local expert what comes back. With LoRA, inputs of linear layers without an
    adapter are not kept, and what adapters keep is."""
    attention = _attention_elements(shape, work, selective and work.local_layers)
    attention += adapter_elements(shape, work, "attention") + work.keeps_inputs(
        "attention"
    ) * hidden_elements(shape, work)
    if selective and not work.local_layers:
        # The second norm is a part of a dense MLP, or its output what the recomputation begins
        # with.
        norms = 3 if shape.num_experts or work.lora.rank else 2
        return norms * hidden_elements(shape, work) + attention
    weighted = 1 if work.local_layers and shape.num_experts else 0
    sent = _sent_elements(shape, work) * work.expert_tensor * (2 if work.local_layers else 1)
    if not work.keeps_inputs("mlp"):
        return 2 * hidden_elements(shape, work) + attention + (2 + weighted) * _units(shape, work)
    ffn = (3 + weighted) * _units(shape, work) + sent + adapter_elements(shape, work, "mlp")
    return 3 * hidden_elements(shape, work) + attention + ffn


def adapter_elements(shape: ModelShape, work: StageWork, part: str) -> int:
    """Elements of one token that a layer's adapters in a part keep.

    These are the products with A and, where a layer has several A, the rows of B among zeros,
    divided among all tokens."""
    lora = work.lora
    elements = 0
    spread = 0
    if lora.rank == 0 or lora.target not in ("all", part):
        return 0
    rules = adapter_rules(shape.architecture, lora.rank, part)
    for a, b in zip(rules[::2], rules[1::2], strict=True):
        rows_of_a = a.sizes[0] * lora.rank
        elements += rows_of_a // (work.tensor if work.sequence and a.split_axis is not None else 1)
        if a.sizes[0] > 1:
            rows = math.prod(shard_shape(b, shape, work.tensor)) // lora.rank
            spread += rows * rows_of_a
    return elements + -(-spread // work.tokens)


def _units(shape: ModelShape, work: StageWork) -> int:
    """Feed-forward units that one token has on this rank."""
    return shape.ffn_size * max(1, shape.experts_per_token) // work.tensor


def _sent_elements(shape: ModelShape, work: StageWork) -> int:
    """Elements of one token's hidden state, once for each of its experts; none without experts."""
    return shape.experts_per_token * hidden_elements(shape, work)


def _attention_elements(shape: ModelShape, work: StageWork, selective: bool) -> int:
    """Elements of a token that attention keeps, of query Q and of key and value K.

    Transformer Engine's keeps the projection (Q + 2 K), of which value is a part, query and key
    turned (Q + K), the output (Q) and the inputs of norms (Q + K). Ours, recomputed ("selective"),
    keeps projection and output; with torch's flash kernel it keeps query, key, value (Q + 2 K) and
    output. Else, on CPU, it keeps query, key and value laid out by segment, the latter two repeated
    to Q, and the output in both layouts; without repetition, where segments are equally long, value
    stays a part of the projection: 2 Q more. Our norms of query and key keep the projection. Where
    the projection behind it has no LoRA adapter, the output stays in one layout, and not if it is
    recomputed."""
    query = shape.num_heads * shape.head_dim // work.tensor
    key = shape.num_kv_heads * shape.head_dim // work.tensor
    projection = query + 2 * key
    if not work.local_layers:
        return projection + 2 * query + key + (query + key if shape.qk_norm else 0)
    flash = (
        work.device_kind == "cuda" and flash_takes(shape.head_dim, work.itemsize) and not selective
    )
    elements = (5 + 2 * (query == key and not shape.qk_norm)) * query
    if selective or flash:
        elements = projection + query
    if not flash and not work.keeps_inputs("attention"):
        elements -= query
    return elements + (projection if shape.qk_norm and not selective else 0)


def backward_bytes(
    shape: ModelShape, work: StageWork, policy: PolicyConfig, in_loss: int = 0
) -> PassBytes:
    """A stage's update at its fullest moment.

    `in_loss` is what the loss holds beside the logits for a teacher. The fullest of three moments
    counts, and in each the other micro-batches in flight are held: the logits' (with the chunks of
    the log-probs or the head's gradient), a layer's backward pass (with what it recomputes, and the
    gradients of gate and up, or what experts return), and the gradient of the embedding, when its
    micro-batch's activations are gone. Stages behind others also hold hidden states on their way:
    two while the logits are there, one in a layer."""
    size = work.tokens * work.itemsize
    hidden = hidden_elements(shape, work)
    chunk, deepest = (elements * size for elements in _chunk_elements(shape, work, policy))
    final_norm = size * hidden if work.has_head else 0
    matrix = head_bytes(shape, work.tensor, work.itemsize)
    logits = _logits_bytes(shape, work)
    other_microbatches = (work.in_flight - 1) * chunk
    received = hidden if work.pipelined else 0
    beside = (2 if work.keeps_inputs("mlp") else 3) * _units(shape, work)
    if (
        not work.local_layers
    ):  # what an expert returns: put together, sorted, and on its way there and back
        beside = max(beside, (2 * work.expert_tensor + 2) * _sent_elements(shape, work))
    moments = [other_microbatches + deepest + size * (beside + hidden + received)]
    if work.has_head:
        # Beside Transformer Engine it is added to its buffer by the product itself
        # (`_dummy_gradient_bytes`), unless logits are wider than the model's format: they have a
        # product of their own (`models.output_layer`).
        wider = work.head_itemsize > work.itemsize and shape.outputs > 1
        gradients = matrix if wider or (work.local_layers and shape.outputs > 1) else 0
        gradients += size * shape.hidden_size
        if work.lora.rank:  # of what enters the head, gathered and not, and of what enters the norm
            gradients = 2 * size * hidden + _gathered_for_frozen_head(shape, work)
        scratch = max(_scratch_bytes(shape, work), gradients, in_loss)
        if (
            wider and work.sequence and not work.lora.rank
        ):  # hidden states gathered for that product
            scratch += size * shape.hidden_size
        moments.append(
            other_microbatches + chunk + final_norm + logits + scratch + 2 * size * received
        )
    if work.has_embedding and not work.lora.rank:
        moments.append(other_microbatches + matrix + size * hidden)
    activations = other_microbatches + chunk + final_norm
    return PassBytes(activations, logits, max(0, max(moments) - activations - logits))


def _chunk_elements(shape: ModelShape, work: StageWork, policy: PolicyConfig) -> tuple[int, int]:
    """Elements per token that a chunk keeps, and those at the deepest point of its backward pass.

    With "full" the inputs of what is recomputed are kept: of groups of so many layers ("uniform"),
    or of the first so many layers, one by one ("block"), whose turn comes when the other layers'
    activations are gone."""
    hidden = hidden_elements(shape, work)
    layers = work.chunk_layers
    layer = layer_elements(shape, work)
    if policy.recompute_granularity != "full":
        elements = layer_elements(
            shape, work, selective=policy.recompute_granularity == "selective"
        )
        plain = layers * elements + hidden
        return plain, plain if work.local_layers else plain + layer - elements
    number = min(policy.recompute_num_layers or 1, layers)
    if policy.recompute_method == "uniform":
        inputs = -(-layers // number) * hidden
        return inputs + hidden, inputs + number * layer
    elements = number * hidden + (layers - number) * layer + hidden
    return elements, max(elements, number * hidden + layer)


def forward_bytes(shape: ModelShape, work: StageWork) -> PassBytes:
    """A pass without gradients at its fullest moment: in a layer's MLP, or at the logits."""
    size = work.tokens * work.itemsize
    hidden = hidden_elements(shape, work)
    logits = _logits_bytes(shape, work)
    # What is sent and comes back, before and after it is sorted, and with several ranks an expert
    # also gathered (counted by tools/fake_rank.py). Of local layers, which split it by expert and
    # put it together, ten times (measured).
    ranks = work.expert_tensor
    copies = 10 * ranks if work.local_layers else 4 if ranks == 1 else 2 + 3 * ranks
    sent = copies * _sent_elements(shape, work)
    # With several chunks hidden states are sent and received while others are computed.
    in_transit = min(work.chunks, 2) if work.pipelined else 0
    # An adapter's sum is made beside the output of fc1.
    products = 4 if work.lora.rank and work.keeps_inputs("mlp") else 3
    layer = size * (products * _units(shape, work) + sent + (4 + in_transit) * hidden)
    working = layer - logits
    if work.has_head:
        gathered = _gathered_for_frozen_head(shape, work)
        working = max(working, _scratch_bytes(shape, work) + size * hidden + gathered)
    return PassBytes(0, logits, max(0, working))


def _scratch_bytes(shape: ModelShape, work: StageWork) -> int:
    """Bytes of the head's scratch memory.

    These are chunks of logits, a GPU's sums of rows, or float32 states for a value."""
    hidden_states = work.tokens * shape.hidden_size
    if shape.outputs == 1:
        return 2 * hidden_states * FLOAT32_BYTES if work.itemsize < FLOAT32_BYTES else 0
    if work.device_kind == "cuda":
        return work.tokens * ROW_BYTES
    chunks = CHUNKS_HELD * CHUNK_BYTES["cpu"]
    if work.head_itemsize == work.itemsize:
        return chunks
    # On CPU the wider product takes both factors in its own format.
    return max(
        chunks, head_bytes(shape, work.tensor, FLOAT32_BYTES) + hidden_states * FLOAT32_BYTES
    )


def head_bytes(shape: ModelShape, tensor: int, itemsize: int) -> int:
    """Bytes of the output layer of a rank of the last stage."""
    return padded_vocab(shape.vocab_size, tensor) // tensor * shape.hidden_size * itemsize


def teacher_loss_bytes(teacher: ModelShape, work: StageWork) -> int:
    """Bytes that the loss on the whole vocabulary holds beside the policy's logits.

    These are blocks of logits in float32 and, on a GPU, the micro-batch's hidden states (on CPU
    they are where they were kept), gathered where ranks share them."""
    if not work.has_head:
        return 0
    columns = padded_vocab(teacher.vocab_size, work.tensor) // work.tensor
    rows = max(1, TEACHER_BLOCK_BYTES[work.device_kind] // (FLOAT32_BYTES * columns))
    blocks = TEACHER_BLOCKS_HELD * min(rows, work.tokens) * columns * FLOAT32_BYTES
    copied = work.device_kind == "cuda" or work.sequence
    return blocks + (work.tokens * teacher.hidden_size * work.itemsize if copied else 0)


def gather_bytes(shape: ModelShape, work: StageWork) -> int:
    """Bytes of Megatron's buffer for hidden states gathered over tensor-parallel ranks.

    With sequence parallelism it stays for good. Transformer Engine's layers have none; the head is
    Megatron's own, and frozen layers gather elsewhere."""
    if not work.sequence or not (work.local_layers or work.has_head) or work.lora.rank:
        return 0
    return work.tokens * shape.hidden_size * work.itemsize


def _gathered_for_frozen_head(shape: ModelShape, work: StageWork) -> int:
    return (
        work.tokens * shape.hidden_size * work.itemsize if work.lora.rank and work.sequence else 0
    )


def _logits_bytes(shape: ModelShape, work: StageWork) -> int:
    if shape.outputs == 1:  # the value head's, float32
        return work.tokens * FLOAT32_BYTES if work.has_head else 0
    columns = padded_vocab(shape.vocab_size, work.tensor) // work.tensor
    return work.tokens * columns * work.head_itemsize if work.has_head else 0


# ---------------------------------------------------------------- an engine


@dataclass(frozen=True)
class EngineBytes:
    """One engine rank's memory."""

    weights: int
    """Weights of the model, and adapters where the engine holds some."""
    workspace: int
    """Activations of the largest engine step, logits and sampling, CUDA graphs; 0 on CPU, where it
    is small."""
    kv_cache: int
    """KV cache: on GPU what the share leaves, below 0 if nothing; on CPU what the settings give."""
    asleep: int
    """Part of the workspace that stays while the engine sleeps.

    These are CUDA graphs, which vLLM does not give back."""
    adapters: int = 0
    """Part of the weights: buffers of LoRA adapters."""


def engine_bytes(
    shape: ModelShape,
    rollout: RolloutConfig,
    device_kind: str,
    itemsize: int,
    device_bytes: int | None,
    lora: LoraConfig = NO_LORA,
) -> EngineBytes:
    """The memory of one engine rank.

    `device_bytes` is the GPU's memory; on CPU the settings give the cache's size."""
    adapters = adapter_buffer_bytes(shape, lora, rollout.tensor_parallel, itemsize=itemsize)
    weights = adapters + weight_bytes(
        shape, rollout.tensor_parallel, itemsize, packed_head=device_kind == "cpu"
    )
    token = kv_bytes_per_token(shape, rollout.tensor_parallel, itemsize)

    def given(gib: float, kind: str) -> int:
        return int(gib * 2**30) // (BLOCK_TOKENS[kind] * token) * BLOCK_TOKENS[kind] * token

    if device_kind == "cpu" or device_bytes is None:
        return EngineBytes(
            weights, 0, given(rollout.cpu_kv_cache_gib, "cpu"), asleep=0, adapters=adapters
        )
    workspace = workspace_bytes(shape, rollout, itemsize, device_bytes=device_bytes)
    if rollout.kv_cache_gib is not None:
        kv_cache = given(rollout.kv_cache_gib, "cuda")
    else:
        kv_cache = int(rollout.memory_share * device_bytes) - weights - workspace
    return EngineBytes(
        weights, workspace, kv_cache, asleep=_graph_bytes(rollout), adapters=adapters
    )


def route_bytes(shape: ModelShape, layers: int, tokens: int) -> int:
    """Bytes of routes: the experts of so many tokens in so many layers."""
    return tokens * layers * shape.experts_per_token * expert_number_bytes(shape.num_experts)


@dataclass(frozen=True)
class StepSequences:
    """The sequences of a step, where all of them are as long as they may be."""

    tokens: int
    """Tokens of one, prompt and completion."""
    sampled: int
    """Sequences of all engines together, also of groups that selection drops, or in flight from
    earlier steps."""
    learned: int
    """Those that the step learns from."""
    minibatches: int = 1
    carried: int = 0
    """The part of `sampled` that later steps learn from."""


@dataclass(frozen=True)
class RouteBytes:
    """Bytes of routes on one rank, all of them in the host's memory."""

    recorded: int
    """Bytes for every slot of an engine's KV cache, for as long as there is an engine."""
    sampled: int
    """Bytes of an engine's completions, on its first rank, until ranks that train have them."""
    replayed: int
    """Bytes of the rank's own micro-batches and layers, until the step's end."""
    carried: int = 0
    """The part of `sampled` that stays there for later steps."""


NO_ROUTES = RouteBytes(0, 0, 0)


def sampled_route_bytes(shape: ModelShape, tokens: int, sequences: int, engines: int) -> int:
    """Bytes of routes of what one of so many engines samples, if each samples an even share.

    The `sequences` have so many `tokens`, of which the last has none. Of Qwen3-30B-A3B (48 layers,
    8 of 128 experts), 8,192 sequences of 8,192 tokens by 128 engines:

    >>> from rlmath.checkpoint.hf.config_json import required_shape
    >>> mixture, _ = required_shape("/nowhere/Qwen3-30B-A3B")
    >>> sampled_route_bytes(mixture, tokens=8192, sequences=8192, engines=128)
    201302016
    """
    return route_bytes(shape, shape.num_layers, -(-sequences // engines) * (tokens - 1))


def replayed_route_bytes(
    shape: ModelShape,
    sequences: StepSequences,
    layers: int,
    data: int,
    multiple: int = 1,
    parts: int = 1,
) -> int:
    """Bytes of routes, in its own layers, of one of `data` ranks that share a step's sequences.

    Micro-batches are padded to a `multiple` of tokens. Of those, a rank that has recorded routes by
    itself has one of so many `parts`."""
    in_minibatch = -(-sequences.learned // sequences.minibatches)
    of_rank = sequences.minibatches * -(-in_minibatch // data)
    padded = -(-sequences.tokens // multiple) * multiple
    return route_bytes(shape, layers, of_rank * padded // parts)


@lru_cache(maxsize=64)
def weight_bytes(shape: ModelShape, ranks: int, itemsize: int, packed_head: bool) -> int:
    """Bytes of the weights of one of `ranks` engine ranks.

    The table of rotary angles that all layers share is among them. `packed_head`: on CPU the head
    is held twice, plain and packed for oneDNN; other matrices only packed, in as many bytes."""
    shapes = engine_shapes(shape, ranks)
    elements = sum(rows * columns for rows, columns in shapes.values())
    if packed_head:
        elements += engine_vocab_rows(shape, ranks) * shape.hidden_size
    return itemsize * elements + FLOAT32_BYTES * shape.rotary_table_positions * shape.head_dim


@lru_cache(maxsize=64)
def adapter_buffer_bytes(shape: ModelShape, lora: LoraConfig, ranks: int, itemsize: int) -> int:
    """Bytes of the buffers in which one of `ranks` engine ranks holds adapters; 0 with none.

    They are padded to the next rank of vLLM's. Beside a matrix whose rows are split A is whole on
    every rank, and beside one whose columns are, B is."""
    adapters = engine_adapters(shape, lora)
    if not adapters:
        return 0
    buffers = engine_shapes(shape, ranks, adapters).items()
    elements = sum(rows * columns for name, (rows, columns) in buffers if ".lora_" in name)
    return itemsize * elements // lora.rank * buffer_rank(lora.rank)


def kv_heads(shape: ModelShape, ranks: int) -> int:
    """Key-value heads of one engine rank; with more ranks than heads each has a copy of one."""
    return max(1, shape.num_kv_heads // ranks)


def kv_bytes_per_token(shape: ModelShape, ranks: int, itemsize: int) -> int:
    """Keys and values of one token over all layers, on one rank."""
    return 2 * shape.num_layers * kv_heads(shape, ranks) * shape.head_dim * itemsize


def longest_sequence_bytes(
    shape: ModelShape, ranks: int, itemsize: int, tokens: int, device_kind: str
) -> int:
    """Bytes of the KV cache of one sequence of `tokens` tokens in whole blocks.

    One block that vLLM keeps for itself is added."""
    block = BLOCK_TOKENS[device_kind]
    return (-(-tokens // block) + 1) * block * kv_bytes_per_token(shape, ranks, itemsize)


def workspace_bytes(
    shape: ModelShape, rollout: RolloutConfig, itemsize: int, device_bytes: int
) -> int:
    """Bytes that vLLM sets aside on GPU beside weights and cache: a formula, not measured.

    A token of an engine step has the residual, two hidden states, and the fused projection or the
    MLP's gate, up and product; a sequence has four rows of logits in float32 (raw, processed,
    sorted, log-probs)."""
    # vLLM 0.32's default (`arg_utils`); an A100 has the smaller one, whatever its memory.
    default = 16384 if device_bytes >= 70 * 2**30 else 8192
    tokens = max(rollout.max_num_batched_tokens or default, rollout.max_num_seqs)
    units = shape.ffn_size * max(1, shape.experts_per_token)
    width = 3 * shape.hidden_size + 3 * units // rollout.tensor_parallel
    logits = 4 * rollout.max_num_seqs * shape.vocab_size * FLOAT32_BYTES
    return tokens * width * itemsize + logits + _graph_bytes(rollout)


def _graph_bytes(rollout: RolloutConfig) -> int:
    """Bytes allowed for captured CUDA graphs: a guess on the safe side, not measured."""
    return 2**30 if rollout.cuda_graphs else 0
