"""What the ranks do in the parity tests.

They build the policy in some layout, and report whole tensors by their Hugging Face names, so that
results of all layouts compare to each other and to transformers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.algorithms.types import Sample
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
)
from rlmath.data.micro_batches import plan_minibatches
from rlmath.data.packing import MicroBatch, pack
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from tests.tiny_models import shape_of

LEARNING_RATE = {"sgd": 10.0, "adam": 0.05}
"""Large, so that an update is not lost in the rounding of the weights it is added to."""
LORA_RANK = 3
LORA_ALPHA = 5.0


@dataclass(frozen=True)
class Case:
    """A layout, and what of the settings differs from plain GRPO with SGD."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    context: int = 1
    expert: int = 1
    sequence: bool = False
    recompute: bool = False
    selective: bool = False
    """Recompute what `policy.recompute_granularity="selective"` does."""
    max_tokens: int = 512
    optimizer: str = "sgd"
    overlap_grad_reduce: bool = False
    kl_coef: float = 0.0
    early_stop_ratio: float | None = None
    min_new_tokens: int = 0
    lr: float | None = None
    """None: LEARNING_RATE of the optimizer."""
    clip_grad: float = 0.0
    device: str = "cpu"
    local_layers: bool = True
    """False: Transformer Engine's, on GPU."""
    dtype: str = "auto"
    """`policy.dtype`: of 16 bits, the optimizer steps float32 copies."""
    head_dtype: str | None = None
    initial_loss_scale: float | None = None
    distributed: bool | None = None
    """Data-parallel ranks share the optimizer's state; None: that of Adam."""
    lora: str | None = None
    """`lora.target` of adapters of LORA_RANK, whose products are multiplied by LORA_ALPHA /
    LORA_RANK."""
    lora_engine: str = "adapters"

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    def __str__(self) -> str:
        extras = [
            f"{self.optimizer}",
            *(["SP"] if self.sequence else []),
            *(["RC"] if self.recompute else []),
            *(["selective"] if self.selective else []),
            *([self.dtype] if self.dtype != "auto" else []),
            *(["float32 head"] if self.head_dtype else []),
            *([f"LoRA {self.lora}"] if self.lora else []),
            *([self.lora_engine] if self.lora_engine != "adapters" else []),
            *(["overlapped"] if self.overlap_grad_reduce else []),
            *([f"VPP{self.virtual_pipeline}"] if self.virtual_pipeline > 1 else []),
            *([f"CP{self.context}"] if self.context > 1 else []),
            *([f"EP{self.expert}"] if self.expert > 1 else []),
            *([f"first{self.first_stage_layers}"] if self.first_stage_layers else []),
            *([f"last{self.last_stage_layers}"] if self.last_stage_layers else []),
        ]
        return (
            f"TP{self.tensor}xPP{self.pipeline}xDP{self.data}-{'-'.join(extras)}-{self.max_tokens}"
        )


def settings(folder: Path, case: Case) -> Config:
    policy = PolicyConfig(
        dtype=case.dtype,
        head_dtype=case.head_dtype,
        max_tokens_per_microbatch=case.max_tokens,
        recompute_granularity="full" if case.recompute else "selective" if case.selective else None,
        recompute_method="uniform" if case.recompute else None,
        recompute_num_layers=1 if case.recompute else None,
    )
    return Config(
        model=ModelConfig(path=str(folder)),
        parallel=ParallelConfig(
            tensor=case.tensor,
            pipeline=case.pipeline,
            virtual_pipeline=case.virtual_pipeline,
            first_stage_layers=case.first_stage_layers,
            last_stage_layers=case.last_stage_layers,
            context=case.context,
            expert=case.expert,
            sequence=case.sequence,
        ),
        policy=policy,
        optimizer=OptimizerConfig(
            kind=case.optimizer,
            lr=LEARNING_RATE[case.optimizer] if case.lr is None else case.lr,
            clip_grad=case.clip_grad,
            distributed=case.optimizer == "adam" if case.distributed is None else case.distributed,
            overlap_grad_reduce=case.overlap_grad_reduce,
            initial_loss_scale=case.initial_loss_scale,
        ),
        algorithm=AlgorithmConfig(kl_coef=case.kl_coef, early_stop_ratio=case.early_stop_ratio),
        rollout=RolloutConfig(temperature=0.8, min_new_tokens=case.min_new_tokens),
        lora=LoraConfig(rank=LORA_RANK, alpha=LORA_ALPHA, target=case.lora, engine=case.lora_engine)
        if case.lora
        else LoraConfig(),
    )


@dataclass
class Stage:
    """One rank's actor and its surroundings."""

    actor: Any
    mesh: Mesh
    shape: Any
    config: Config
    device: Any


def build(folder: Path, case: Case, **policy: Any) -> Stage:
    device = open_device(case.device, case.local_layers, case.dtype, case.head_dtype)
    init_process_group(device, 120.0)
    return lay_out(folder, case, device, **policy)


def lay_out(folder: Path, case: Case, device: Any, **policy: Any) -> Stage:
    """The actor in the layout of `case` over the ranks of the process group.

    `policy` are settings of that section."""
    from rlmath.models.build import build_actor
    from rlmath.models.megatron import start_megatron

    mesh = Mesh(
        dist.get_rank(),
        dist.get_world_size(),
        case.tensor,
        case.pipeline,
        engine_size=1,
        virtual_pipeline=case.virtual_pipeline,
        context=case.context,
        expert=case.expert,
    )
    start_megatron(mesh, device, seed=1, timeout_seconds=120.0)
    config = settings(folder, case)
    shape = shape_of(folder)
    config = replace(config, policy=replace(config.policy, **policy))
    actor = build_actor(config, shape, mesh, device, total_updates=10, stop_token_ids=(1,))
    return Stage(actor, mesh, shape, config, device)


def microbatches(stage: Stage, samples: list[Sample]) -> list[MicroBatch]:
    """This rank's share of one minibatch of all samples."""
    config = stage.config
    mesh = stage.mesh
    lengths = [sample.length for sample in samples]
    (plan,) = plan_minibatches(
        lengths,
        1,
        mesh.data,
        config.policy.max_tokens_per_microbatch,
        seed=3,
        count_multiple=mesh.microbatch_multiple,
    )
    multiple = mesh.tensor if config.parallel.sequence else 1
    return [
        pack(samples, indices, multiple) for indices in plan.microbatches_by_rank[mesh.data_rank]
    ]


def by_sample(batches: list[MicroBatch], per_token: list[Tensor]) -> dict[int, list[float]]:
    """Completion values of every sample (by its index) out of packed tensors."""
    completion_values = {}
    for batch, values_T in zip(batches, per_token, strict=True):
        bounds = batch.cu_seqlens_S1.tolist()
        for index, (start, end) in zip(
            batch.sample_indices, itertools.pairwise(bounds), strict=False
        ):
            counted = batch.loss_weights_T[start:end] > 0
            completion_values[index] = values_T.cpu()[start:end][counted].tolist()
    return completion_values


def logprobs(folder: Path, case: Case, samples: list[Sample]) -> dict[int, list[float]]:
    """Log-probs of completion tokens by sample; empty off the last stage."""
    stage = build(folder, case)
    batches = microbatches(stage, samples)
    results = stage.actor.forward_backward.logprobs(batches)
    if not stage.mesh.is_last_stage:
        return {}
    return by_sample(batches, results)


def refusal(folder: Path, case: Case) -> str:
    """What a rank says of a model that it must not train."""
    try:
        build(folder, case)
    except ValueError as error:
        return str(error)
    return "nothing"


def whole_tensors(stage: Stage, adapters_alone: bool = False) -> dict[str, Tensor]:
    """The actor's parameters as whole Hugging Face tensors, its adapters merged.

    With `adapters_alone` only the adapters, by PEFT's names."""
    from rlmath.checkpoint.hf.weight_map import adapter_rules
    from rlmath.checkpoint.hf.weights import stream_hf_tensors

    lora = stage.config.lora
    rules = None
    if adapters_alone:
        rules = adapter_rules(stage.shape.architecture, lora.rank, lora.target)
    stream = stream_hf_tensors(stage.actor.chunks, stage.shape, stage.mesh, rules)
    return {name: tensor.clone() for name, tensor in stream}


def trained_parameters(stage: Stage) -> list[Tensor]:
    return [p for chunk in stage.actor.chunks for p in chunk.parameters() if p.requires_grad]


def updates(
    folder: Path, case: Case, samples: list[Sample]
) -> tuple[dict[str, Tensor], list[Any], int] | None:
    """Updates by minibatches of different numbers of micro-batches; the second is discarded.

    Returns, from rank 0, the weights, the results, and how often an expert got no token."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    stage = build(folder, replace(case, early_stop_ratio=5.0))
    idle = []
    for module in itertools.chain(*(chunk.modules() for chunk in stage.actor.chunks)):
        if isinstance(module, SequentialMLP):
            module.register_forward_pre_hook(
                lambda _, inputs: idle.append(int((inputs[1] == 0).sum()))
            )
    short_samples = [Sample((5,), (6,), (-4.6,), 1.0), Sample((7,), (8,), (-4.6,), -1.0)]
    parts = [samples[:16], _poisoned(samples, "runaway"), short_samples, samples[4:]]
    results = [stage.actor.learner.learn(microbatches(stage, part), None, None) for part in parts]
    weights = whole_tensors(stage)
    return (weights, results, sum(idle)) if stage.mesh.rank == 0 else None


def streamed(folder: Path, case: Case) -> dict[str, Tensor] | None:
    """The tensors as they were loaded, out of this layout again, from rank 0."""
    stage = build(folder, case)
    tensors = whole_tensors(stage)
    return tensors if stage.mesh.rank == 0 else None


@torch.no_grad()
def whole_gradients(stage: Stage) -> dict[str, Tensor]:
    """The reduced gradients as Hugging Face tensors, those of adapters by PEFT's names.

    They are swapped into the parameters, streamed, and swapped back. Needs training without the
    distributed optimizer: with it a rank holds the reduced gradient of its share of the buffer
    only."""
    scale = stage.actor.learner.loss_scale
    parameters = trained_parameters(stage)
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = whole_tensors(stage, adapters_alone=bool(stage.config.lora.rank))
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return {
        name: gradient.float() / (scale.scale if scale else 1)
        for name, gradient in gradients.items()
    }


def gradients(folder: Path, case: Case, samples: list[Sample]) -> dict[str, Tensor] | None:
    """Gradients of one minibatch, from rank 0."""
    stage = build(folder, replace(case, optimizer="sgd"))
    batches = microbatches(stage, samples)
    learner = stage.actor.learner
    learner.forward_backward.zero_grad()
    learner.forward_backward.run(
        batches,
        partial(learner._loss, old=None, reference=None, on_policy=False, teacher=None),
        forward_only=False,
    )
    tensors = whole_gradients(stage)
    return tensors if stage.mesh.rank == 0 else None


def update(folder: Path, case: Case, samples: list[Sample]) -> tuple[dict[str, Tensor], Any] | None:
    """Weights after one minibatch, and its result, from rank 0."""
    from rlmath.models.build import build_reference

    stage = build(folder, case)
    batches = microbatches(stage, samples)
    reference = None
    if case.kl_coef:
        other = build_reference(
            stage.config, stage.shape, stage.mesh, stage.device, (1,), stage.actor
        )
        with torch.no_grad():
            for parameter in itertools.chain(*(chunk.parameters() for chunk in other.chunks)):
                parameter.mul_(1.05)
        reference = other.logprobs(batches)
    result = stage.actor.learner.learn(batches, None, reference)
    weights = whole_tensors(stage)
    return (weights, result) if stage.mesh.rank == 0 else None


def discard(folder: Path, case: Case, samples: list[Sample], poison: str) -> dict[str, Any]:
    """Learn once, then meet a minibatch that must be discarded.

    Reports whether every bit of the state stayed, and whether gradients are zero again."""
    stage = build(folder, case)
    learner = stage.actor.learner
    first = learner.learn(microbatches(stage, samples), None, None)
    before = policy_state(stage)
    batches = microbatches(stage, _poisoned(samples, poison))
    second = learner.learn(batches, None, None)
    after = policy_state(stage)
    cleared = not any(p.main_grad.any() for p in trained_parameters(stage))
    third = learner.learn(microbatches(stage, samples), None, None)
    moved = policy_state(stage)
    return {
        "first": first.discarded,
        "reason": second.discarded,
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "names": sorted(before),
        "cleared": cleared,
        "goes_on": third.discarded is None
        and any(not torch.equal(after[n], moved[n]) for n in after),
        "lr": (first.learning_rate, second.learning_rate, third.learning_rate),
    }


def overflows(folder: Path, case: Case, samples: list[Sample]) -> dict[str, Any]:
    """Try the same minibatch until it is learned from.

    Reports what every try gave, whether each discarded try left all bits of the state, and the
    state in the end."""
    stage = build(folder, case)
    results = []
    unchanged = True
    while not results or (results[-1].discarded and len(results) < 40):
        before = policy_state(stage)
        results.append(stage.actor.learner.learn(microbatches(stage, samples), None, None))
        after = policy_state(stage)
        if results[-1].discarded:
            unchanged = (
                unchanged
                and before.keys() == after.keys()
                and all(map(torch.equal, before.values(), after.values()))
            )
    return {
        "results": results,
        "same": unchanged,
        "state": after,
        "updates": stage.actor.learner.updates,
    }


def finds_values_that_are_not_finite(folder: Path, case: Case, samples: list[Sample]) -> list[bool]:
    """Whether this rank's state is finite: after an update, with each NaN, and without them again.

    One NaN at a time stands at the end of a parameter of each chunk, then of a tensor of the
    optimizer's state for it."""
    from rlmath.checkpoint.sharded_state import held_by
    from rlmath.run.divergence import all_state_finite

    stage = build(folder, case)
    chunks = stage.actor.chunks
    optimizer = stage.actor.learner.optimizer
    assert stage.actor.learner.learn(microbatches(stage, samples), None, None).discarded is None
    states = {id(stepped.parameter): stepped.tensors()["exp_avg"] for stepped in held_by(optimizer)}
    verdicts = [all_state_finite(chunks, optimizer)]
    for chunk in chunks:
        parameter = next(candidate for candidate in chunk.parameters() if id(candidate) in states)
        for tensor in (parameter.detach(), states[id(parameter)]):
            last_element = tensor.view(-1)[-1:]
            number = last_element.clone()
            last_element.fill_(float("nan"))
            verdicts.append(all_state_finite(chunks, optimizer))
            last_element.copy_(number)
    return [*verdicts, all_state_finite(chunks, optimizer)]


def _poisoned(samples: list[Sample], poison: str) -> list[Sample]:
    """The samples with one that is bad, so that one micro-batch of one rank has it."""
    first, *unharmed = samples
    if poison == "runaway":
        off = tuple(p - 12.0 for p in first.behaviour_logprobs)
        return [replace(first, behaviour_logprobs=off), *unharmed]
    if poison == "overflow":
        off = tuple(p - 200.0 for p in first.behaviour_logprobs)
        return [replace(first, behaviour_logprobs=off), *unharmed]
    return [replace(first, advantage=float(poison)), *unharmed]


def policy_state(stage: Stage) -> dict[str, Tensor]:
    """Every tensor of parameters, optimizer and scheduler of this rank."""
    state = {
        f"parameter {number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(stage.actor.chunks)
        for name, parameter in chunk.named_parameters()
    }
    chained = getattr(
        stage.actor.learner.optimizer, "chained_optimizers", [stage.actor.learner.optimizer]
    )
    for number, optimizer in enumerate(chained):
        stepped = [
            tensor for group in optimizer.optimizer.param_groups for tensor in group["params"]
        ]
        for index, parameter in enumerate(stepped):
            for key, value in optimizer.optimizer.state.get(parameter, {}).items():
                state[f"optimizer {number}.{index}.{key}"] = torch.as_tensor(value).clone()
    state["scheduler steps"] = torch.tensor(stage.actor.learner.scheduler.num_steps)
    return state
