"""The work of log-probs and updates: FLOPs, the pipeline's bubble, and what ranks exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlmath.checkpoint.hf.weight_map import adapter_rules, padded_vocab
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.seqlen_balancing import forward_cost
from rlmath.distributed.mesh import Mesh
from rlmath.planning.memory_estimate import Target, adapter_sizes, expert_sizes, parameter_sizes, stage_work
from rlmath.planning.memory_formulas import FLOAT32_BYTES, layer_elements
from rlmath.planning.planner.lengths import Batch
from rlmath.planning.planner.work import Cluster, Work
from rlmath.rollout.weight_sync.shard_layouts import stage_layers

FORWARD, BACKWARD = 1.0, 2.0
"""Multiplications of a pass in those of a forward pass."""
MINIBATCH_MESSAGES = 8
"""Collectives of an update beside those of gradients and parameters: sums of the loss and its metrics, norms."""
ADAM_BYTES = 28
"""Read and written by Adam for a parameter: gradient, two moments and the float32 parameter, the last three twice."""
GRADIENT_BYTES = 12
"""Written with zeros, read for the norm and scaled: three times float32."""


@dataclass(frozen=True)
class Passes:
    """How often what is done with a micro-batch."""

    linear: float
    """Forward passes' worth of matrix multiplications of a layer."""
    attention: float
    head: float
    exchanges: float
    """Forward passes' worth of sums over tensor-parallel ranks."""
    routes: float
    """Forward passes' worth of tokens sent to experts and back."""
    touches: float
    """Times that a layer's activations are read or written."""
    runs: int
    """Passes of a micro-batch: forward, and backward."""


LOGPROBS = Passes(FORWARD, FORWARD, FORWARD, exchanges=1, routes=1, touches=2, runs=1)


def update_passes(shape: ModelShape, config: Config, chunk_layers: int, local_layers: bool) -> Passes:
    """Forward and backward, and what is recomputed: all of a layer ("full"); its MLP, of local layers its attention
    ("selective"). With LoRA the backward pass has no products for gradients of the weights."""
    policy = config.policy
    linear = attention = exchanges = routes = 0.0
    if policy.recompute_granularity == "full":
        share = 1.0
        if policy.recompute_method == "block":
            share = min(1.0, (policy.recompute_num_layers or 1) / chunk_layers)
        linear = attention = exchanges = routes = share
    elif policy.recompute_granularity == "selective" and local_layers:
        attention = FORWARD
    elif policy.recompute_granularity == "selective":
        linear = mlp_share(shape)
        exchanges, routes = (0.0, 1.0) if shape.num_experts else (0.5, 0.0)  # one of a layer's two sums
    of_matrices = FORWARD + (BACKWARD / 2 if config.lora.rank else BACKWARD)
    return Passes(
        of_matrices + linear,
        FORWARD + BACKWARD + attention,
        of_matrices,
        exchanges=2 + exchanges,
        routes=2 + routes,
        touches=6 + 2 * linear,
        runs=2,
    )


def mlp_share(shape: ModelShape) -> float:
    """Share of the multiplications of a layer's matrices that its MLP has."""
    mlp = 3 * shape.ffn_size * max(1, shape.experts_per_token)
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return mlp / (mlp + attention)


@dataclass(frozen=True)
class StepInputs:
    """Everything that the work of a step follows from."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    """Layout of the ranks that train."""
    target: Target
    cluster: Cluster
    """Nodes of the ranks that do the work; in a phase of training those that train."""
    batch: Batch

    @property
    def parts(self) -> int:
        """Ranks that share the step's tokens."""
        return self.mesh.data * self.mesh.context

    @property
    def microbatches(self) -> int:
        """Micro-batches of one minibatch on a data-parallel rank: as few as hold its tokens, in the needed multiple."""
        tokens = self.batch.tokens / self.config.algorithm.n_minibatches / self.mesh.data
        multiple = self.mesh.microbatch_multiple
        least = math.ceil(tokens / self.config.policy.max_tokens_per_microbatch)
        return -(-max(1, least) // multiple) * multiple

    @property
    def idle_factor(self) -> float:
        """Seconds of a pipeline over those of its work: (m + (p - 1) / v) / m of m micro-batches, p stages and v
        chunks (Megatron-LM, arXiv:2104.04473, section 2.2)."""
        mesh, count = self.mesh, self.microbatches
        return (count + (mesh.pipeline - 1) / mesh.virtual_pipeline) / count


def update_work(inputs: StepInputs) -> Work:
    """All updates of a step, on the rank that has the most to do."""
    algorithm = inputs.config.algorithm
    updates = [_stage_update(inputs, mesh, layers) for mesh, layers in stages(inputs)]
    most = max(updates, key=lambda work: work.flops)
    return most.times(algorithm.epochs)


def logprobs_work(inputs: StepInputs) -> Work:
    """Log-probs of all sequences of a step: one forward pass."""
    return max(
        (_pass_work(inputs, mesh, layers, LOGPROBS) for mesh, layers in stages(inputs)),
        key=lambda work: work.flops,
    )


def critic_work(inputs: StepInputs) -> Work:
    """Values of all sequences of a step, and the critic's updates; `inputs` has the critic's shape."""
    return logprobs_work(inputs) + update_work(inputs)


def stages(inputs: StepInputs) -> list[tuple[Mesh, int]]:
    """The first rank of every pipeline stage, and its layers."""
    mesh, parallel = inputs.mesh, inputs.config.parallel
    uneven = (parallel.first_stage_layers, parallel.last_stage_layers)
    layers = stage_layers(inputs.shape.num_layers, mesh.pipeline, mesh.virtual_pipeline, *uneven)
    per_stage = mesh.world_size // mesh.pipeline
    return [(replace(mesh, rank=stage * per_stage), len(held)) for stage, held in enumerate(layers)]


def _stage_update(inputs: StepInputs, mesh: Mesh, layers: int) -> Work:
    chunk_layers, target = max(1, layers // mesh.virtual_pipeline), inputs.target
    passes = update_passes(inputs.shape, inputs.config, chunk_layers, target.local_layers)
    minibatches = inputs.config.algorithm.n_minibatches
    each = sum(gradient_exchanges(inputs, mesh, layers).values(), _optimizer_work(inputs, mesh, layers))
    return _pass_work(inputs, mesh, layers, passes) + each.times(minibatches)


def _pass_work(inputs: StepInputs, mesh: Mesh, layers: int, passes: Passes) -> Work:
    """All sequences of a step through one pipeline stage, once."""
    shape, batch, config = inputs.shape, inputs.batch, inputs.config
    cost, share = forward_cost(shape), layers / shape.num_layers
    head = 2.0 * shape.hidden_size * shape.outputs  # FLOPs of the output layer for one token, forwards
    flops = batch.tokens * share * (cost.linear - head) * passes.linear
    flops += batch.squares * share * cost.quadratic * passes.attention
    tokens = batch.tokens / inputs.parts
    stage = stage_work(config, shape, mesh, inputs.target, layers)
    touched = layers * layer_elements(shape, stage) * passes.touches
    if mesh.is_last_stage:
        flops += batch.tokens * head * passes.head
        touched += padded_vocab(shape.outputs, mesh.tensor) / mesh.tensor * 3 * passes.head
    runs = inputs.microbatches * config.algorithm.n_minibatches * passes.runs
    work = Work(
        flops=flops / inputs.parts / mesh.tensor * inputs.idle_factor,
        memory=tokens * touched * inputs.target.itemsize * inputs.idle_factor,
        microbatches=runs * mesh.virtual_pipeline * inputs.idle_factor,
    )
    return sum(pass_exchanges(inputs, mesh, layers, passes).values(), work)


def pass_exchanges(inputs: StepInputs, mesh: Mesh, layers: int, passes: Passes) -> dict[str, Work]:
    """Between the ranks of a micro-batch, in a pass of all sequences of a step: sums of hidden states over
    tensor-parallel ranks, every token to its experts and back, and hidden states to the next stage."""
    shape, cluster, config = inputs.shape, inputs.cluster, inputs.config
    sequence = config.parallel.sequence
    state = inputs.batch.tokens / inputs.parts * shape.hidden_size * inputs.target.itemsize
    count = inputs.microbatches * inputs.config.algorithm.n_minibatches
    found = {}
    if mesh.tensor > 1:
        # A sum is two exchanges of all hidden states: scattered sums, which are gathered. With sequence parallelism
        # they are messages of their own, with a layer's work between them.
        halves = 1 if shape.num_experts else 2  # experts get their tokens from `expert`
        exchanges = layers * halves * 2 * passes.exchanges + _exchanges_at_the_ends(mesh, sequence, passes)
        if config.lora.rank:  # and the adapters' products with A, as wide as their ranks
            rules = adapter_rules(shape.architecture, config.lora.rank, config.lora.target)[::2]
            width = config.lora.rank * sum(len(a.hf) for a in rules)
            exchanges += layers * passes.exchanges * width / shape.hidden_size
        if sequence and passes.runs > 1 and not config.lora.rank:
            exchanges += layers * halves  # the input of a product is gathered again for its weights' gradient
        sent = state * exchanges * (mesh.tensor - 1) / mesh.tensor
        messages = count * exchanges / (1 if sequence else 2)
        found["tensor"] = _sent(sent, messages, cluster.in_a_node(mesh.tensor))
    if mesh.expert > 1:
        ways = 2 * layers * passes.routes
        part = (mesh.expert - 1) / mesh.expert / (mesh.tensor if sequence else 1)
        inside = cluster.in_a_node(mesh.expert * mesh.expert_tensor)
        found["expert"] = _sent(state * shape.experts_per_token * ways * part, count * ways, inside)
    if mesh.expert_tensor > 1:
        ways = 2 * layers * passes.routes
        part = (mesh.expert_tensor - 1) / (mesh.tensor if sequence else 1)
        inside = cluster.in_a_node(mesh.expert_tensor)
        found["expert_tensor"] = _sent(state * shape.experts_per_token * ways * part, count * ways, inside)
    if mesh.pipeline > 1:
        part = 1 / mesh.tensor if sequence else 1.0
        ways = passes.runs * mesh.virtual_pipeline
        found["pipeline"] = _sent(state * part * ways, count * ways, cluster.nodes == 1)
    return found


def _exchanges_at_the_ends(mesh: Mesh, sequence: bool, passes: Passes) -> int:
    """Exchanges of all hidden states over tensor-parallel ranks, for the embedding and for the output layer."""
    backward = passes.runs > 1
    found = 0
    if mesh.pipeline_rank == 0:
        found += 1 + backward if sequence else 2
    if mesh.is_last_stage:
        found += 1 + 2 * backward if sequence else 2 * backward
    return found


def _sent(size: float, messages: float, inside: bool) -> Work:
    return Work(node=size if inside else 0.0, network=0.0 if inside else size, messages=messages)


@dataclass(frozen=True)
class Held:
    """Parameters of a rank that the same ranks have."""

    parameters: int
    ranks: int
    """Number of ranks that have the same, and share gradients and Adam's state."""
    stride: int
    """From one of them to the next."""


def held_parameters(inputs: StepInputs, mesh: Mesh, layers: int) -> tuple[Held, ...]:
    """Those that learn: experts have groups of their own, and LoRA has none of them."""
    lora = inputs.config.lora
    if lora.rank:
        adapters = sum(map(sum, adapter_sizes(lora, inputs.shape, mesh, layers)))
        return (Held(adapters, inputs.parts, mesh.tensor),)
    dense = sum(map(sum, parameter_sizes(inputs.shape, mesh, layers)))
    experts = sum(map(sum, expert_sizes(inputs.shape, mesh, layers)))
    found = Held(dense, inputs.parts, mesh.tensor)
    if not experts:
        return (found,)
    return found, Held(experts, mesh.expert_data, mesh.expert * mesh.expert_tensor)


def _optimizer_work(inputs: StepInputs, mesh: Mesh, layers: int) -> Work:
    """One optimizer step: gradients are cleared and measured, and every rank moves its share of the parameters."""
    work = Work(messages=MINIBATCH_MESSAGES)
    for held in held_parameters(inputs, mesh, layers):
        shares = held.ranks if inputs.config.optimizer.distributed else 1
        work += Work(memory=held.parameters * (GRADIENT_BYTES + ADAM_BYTES / shares))
    return work


def gradient_exchanges(inputs: StepInputs, mesh: Mesh, layers: int) -> dict[str, Work]:
    """One minibatch's gradients in float32: scattered, and the new parameters gathered; or summed on all ranks; and
    those of an embedding that is the output layer, too, between the first and the last stage. What goes to other nodes
    is shared by the network cards of the ranks of a node that are in the same group."""
    # Megatron's two optimizers of a model with experts gather the parameters of both, each.
    gathers = 2 if inputs.shape.num_experts else 1
    ways, messages = FLOAT32_BYTES + gathers * inputs.target.itemsize, (1 + gathers) * mesh.virtual_pipeline
    if not inputs.config.optimizer.distributed:
        ways, messages = 2 * FLOAT32_BYTES, 2 * mesh.virtual_pipeline
    found = {}
    for name, held in zip(("data", "expert_data"), held_parameters(inputs, mesh, layers), strict=False):
        if held.ranks == 1:
            continue
        sent = held.parameters * ways * (held.ranks - 1) / held.ranks
        if inputs.cluster.in_a_node(held.stride * held.ranks):
            found[name] = _sent(sent, messages, inside=True)
        else:
            beside = max(1, min(held.ranks, inputs.cluster.ranks_per_node // held.stride))
            node = sent if beside > 1 else 0.0
            found[name] = Work(node=node, network=sent / beside, messages=messages)
    learns_embedding = inputs.shape.tied_embeddings and not inputs.config.lora.rank
    if learns_embedding and mesh.pipeline > 1 and (mesh.is_last_stage or mesh.pipeline_rank == 0):
        # The first and the last stage hold the same matrix.
        rows = padded_vocab(inputs.shape.vocab_size, mesh.tensor) // mesh.tensor
        sent = rows * inputs.shape.hidden_size * FLOAT32_BYTES
        found["embedding"] = _sent(sent, 1, inputs.cluster.nodes == 1)
    return found
