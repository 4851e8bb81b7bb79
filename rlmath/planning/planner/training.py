"""The seconds of log-probs and updates: FLOPs, the pipeline's bubble, and what ranks exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, LoraConfig, PolicyConfig
from rlmath.data.micro_batches import forward_cost
from rlmath.distributed.mesh import Mesh
from rlmath.planning.memory_estimate import Target, gradient_buffers, own_layers
from rlmath.planning.memory_formulas import FLOAT32_BYTES
from rlmath.planning.planner.cluster import Cluster
from rlmath.planning.planner.lengths import Batch


@dataclass(frozen=True)
class StepInputs:
    """Inputs that the seconds of a step follow from."""

    config: Config
    shape: ModelShape
    """The policy's; in a phase of critic or teacher, that of the model that computes."""
    shapes: RunShapes
    target: Target
    cluster: Cluster
    """Nodes of the ranks that do the work; in a phase of training those that train."""
    batch: Batch
    mesh: Mesh
    """Layout of the ranks that train."""

    @property
    def parts(self) -> int:
        """Ranks that share the step's tokens."""
        return self.mesh.data * self.mesh.context

    @property
    def microbatches(self) -> int:
        """Micro-batches of one minibatch on a data-parallel rank.

        They are as few as hold its tokens, in the needed multiple."""
        tokens = self.batch.tokens / self.config.algorithm.n_minibatches / self.mesh.data
        multiple = self.mesh.microbatch_multiple
        least = math.ceil(tokens / self.config.policy.max_tokens_per_microbatch)
        return -(-max(1, least) // multiple) * multiple

    @property
    def idle_factor(self) -> float:
        """Seconds of a pipeline divided by those of its work.

        For m micro-batches, p stages and v chunks this is (m + (p - 1) / v) / m (Megatron-LM,
        arXiv:2104.04473, section 2.2)."""
        mesh = self.mesh
        count = self.microbatches
        return (count + (mesh.pipeline - 1) / mesh.virtual_pipeline) / count

    def stages(self) -> list[Mesh]:
        """The place of the first rank of every pipeline stage."""
        per_stage = self.mesh.world_size // self.mesh.pipeline
        return [replace(self.mesh, rank=stage * per_stage) for stage in range(self.mesh.pipeline)]


@dataclass(frozen=True)
class Passes:
    """Forward passes' worth of work with a micro-batch."""

    matrices: float
    """Passes' worth of products with a layer's matrices; the output layer's are not recomputed."""
    attention: float
    recomputed: float = 0.0
    """Share of `matrices` that computes a layer again."""
    runs: int = 1
    """1 for forward alone, 2 for forward and backward."""


LOGPROBS = Passes(1.0, 1.0)


def update_passes(shape: ModelShape, policy: PolicyConfig, lora: LoraConfig, layers: int) -> Passes:
    """Passes of an update: forward, backward and what is recomputed of `layers` of a chunk.

    Recomputed are all ("full"), the first ones of a chunk ("block"), or their MLPs ("selective").
    With LoRA the backward pass has no products for gradients of the weights."""
    matrices = 2.0 if lora.rank else 3.0
    recomputed = 0.0
    if policy.recompute_granularity == "full":
        recomputed = 1.0
        if policy.recompute_method == "block":
            recomputed = min(1.0, (policy.recompute_num_layers or 1) / layers)
    elif policy.recompute_granularity == "selective":
        mlp = 3 * shape.ffn_size * max(1, shape.experts_per_token)
        attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        return Passes(matrices + mlp / (mlp + attention), 3.0, mlp / (mlp + attention), runs=2)
    return Passes(matrices + recomputed, 3.0 + recomputed, recomputed, runs=2)


def logprobs_seconds(inputs: StepInputs) -> float:
    """Seconds of the log-probs of all sequences of a step: one forward pass."""
    return max(_pass_seconds(inputs, mesh, LOGPROBS) for mesh in inputs.stages())


def update_seconds(inputs: StepInputs) -> float:
    """Seconds of all updates of a step, on the rank that has the most to do."""
    config = inputs.config
    algorithm = inputs.config.algorithm
    stage_seconds = []
    for mesh in inputs.stages():
        layers = own_layers(config.parallel, inputs.shape, mesh)
        chunk_layers = max(1, layers // mesh.virtual_pipeline)
        passes = update_passes(inputs.shape, config.policy, config.lora, layers=chunk_layers)
        gradients = algorithm.n_minibatches * gradient_seconds(inputs, mesh, layers)
        stage_seconds.append(_pass_seconds(inputs, mesh, passes) + gradients)
    return algorithm.epochs * max(stage_seconds)


def _pass_seconds(inputs: StepInputs, mesh: Mesh, passes: Passes) -> float:
    """Seconds of all sequences of a step through one pipeline stage, once."""
    shape = inputs.shape
    batch = inputs.batch
    layers = own_layers(inputs.config.parallel, shape, mesh)
    cost = forward_cost(shape)
    share = layers / shape.num_layers
    head = (
        2.0 * shape.hidden_size * shape.outputs
    )  # FLOPs of the output layer for one token, forwards
    flops = batch.tokens * share * (cost.linear - head) * passes.matrices
    flops += batch.squares * share * cost.quadratic * passes.attention
    if mesh.is_last_stage:
        flops += batch.tokens * head * (passes.matrices - passes.recomputed)
    runs = (
        inputs.microbatches
        * inputs.config.algorithm.n_minibatches
        * passes.runs
        * mesh.virtual_pipeline
    )
    seconds = inputs.cluster.compute_seconds(flops / inputs.parts / mesh.tensor)
    seconds += runs * inputs.cluster.coefficients.microbatch_seconds
    return seconds * inputs.idle_factor + exchange_seconds(inputs, mesh, layers, passes=passes)


def exchange_seconds(inputs: StepInputs, mesh: Mesh, layers: int, passes: Passes) -> float:
    """Seconds of exchanges between the ranks of a micro-batch.

    These are two sums of hidden states a layer over tensor-parallel ranks, every token to its
    experts and back, and hidden states to the next stage. What the embedding, the output layer and
    adapters send is left out, and messages of context parallelism."""
    shape = inputs.shape
    cluster = inputs.cluster
    config = inputs.config
    state = inputs.batch.tokens / inputs.parts * shape.hidden_size * inputs.target.itemsize
    split = mesh.tensor if config.parallel.sequence else 1
    count = inputs.microbatches * config.algorithm.n_minibatches
    runs = passes.runs + passes.recomputed
    seconds = 0.0
    if mesh.tensor > 1:
        sums = (
            layers * runs * (1 if shape.num_experts else 2)
        )  # experts get their tokens from others
        seconds += cluster.link_seconds(
            state * sums * 2 * (mesh.tensor - 1) / mesh.tensor, count * sums, mesh.tensor
        )
    if (experts := mesh.expert * mesh.expert_tensor) > 1:
        # A token goes to the ranks of its experts, and there to all that share an expert.
        ways = 2 * layers * runs
        parts = 1 - 1 / mesh.expert + mesh.expert_tensor - 1
        seconds += cluster.link_seconds(
            state / split * shape.experts_per_token * ways * parts, count * ways, experts
        )
    if mesh.pipeline > 1:
        ways = passes.runs * mesh.virtual_pipeline
        seconds += cluster.link_seconds(state / split * ways, count * ways, mesh.world_size)
    return seconds


def gradient_seconds(inputs: StepInputs, mesh: Mesh, layers: int) -> float:
    """Seconds of one minibatch's gradients among the ranks that have the same parameters.

    In float32 they are scattered, and the new parameters gathered; or they are summed on all ranks.
    The network cards of a node share what its ranks send to others."""
    config = inputs.config
    distributed = config.optimizer.distributed
    ways = FLOAT32_BYTES + (inputs.target.itemsize if distributed else FLOAT32_BYTES)
    per_node = inputs.cluster.ranks_per_node
    seconds = 0.0
    for sizes, ranks, stride in gradient_buffers(config.lora, inputs.shape, mesh, layers=layers):
        sent = sum(sizes) * ways * (ranks - 1) / ranks
        beside = max(1, min(ranks, per_node // stride))
        if ranks > 1:
            seconds += inputs.cluster.link_seconds(sent, 2, stride * ranks, beside)
    return seconds
