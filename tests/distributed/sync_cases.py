"""What the ranks do in the tests of the weight sync.

They bring a plain module, which has the names and shapes of vLLM's, up to the policy's weights, and
compare it with the policy's whole tensors.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import merging_bytes
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.engine_adapters import adapter_buffers
from rlmath.rollout.engine_weights import EngineWeights
from rlmath.rollout.weight_sync.shard_layouts import engine_adapters, engine_shapes, training_layout
from tests.distributed.memory_plan_cases import StorageWatch
from tests.distributed.policy_cases import (
    LORA_RANK,
    Case,
    Stage,
    build,
    lay_out,
    microbatches,
    whole_tensors,
)
from tests.rollout.weight_sync.oracle import engine_parameters
from tests.tiny_models import make_samples

BUFFER_RANK = 8
"""Rank of vLLM's buffers for adapters of LORA_RANK."""


@dataclass
class Target:
    """A plain module in the place of an engine, and the sync that writes it."""

    model: torch.nn.Module
    sync: Any
    mesh: Mesh
    stage: Stage

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def wrong(self) -> list[str]:
        """Parameters that are not the policy's, bit by bit, padding included, and adapters.

        The product of an adapter's buffers, padding included, should be that of the policy's."""
        lora = self.stage.config.lora
        whole = base_tensors(self.stage) if lora.rank else whole_tensors(self.stage)
        products = adapter_products(self.stage) if lora.rank else {}
        if lora.engine == "merged":
            whole |= {
                name: (whole[name] + product).to(whole[name].dtype)
                for name, product in products.items()
            }
        parameters = self.parameters
        expected = self._cut(whole)
        assert parameters.keys() == expected.keys()
        wrong = [
            name
            for name, matrix in expected.items()
            if not torch.equal(
                parameters[name], matrix.to(parameters[name].dtype).view_as(parameters[name])
            )
        ]
        if lora.engine == "adapters" and lora.rank:
            blank = {name: torch.zeros_like(tensor).double() for name, tensor in whole.items()}
            for name, product in self._cut(blank | products).items():
                if not name.endswith(".weight"):
                    continue
                layer = self.model.get_submodule(name.rpartition(".")[0])
                held = held_product(layer, product)
                precision = 1e-6 if self.stage.device.params_dtype == torch.float32 else 1 / 64
                if not torch.allclose(held, product, rtol=0, atol=precision * product.abs().max()):
                    wrong.append(f"adapter of {name}")
        return wrong

    def _cut(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        size = self.mesh.engine_size
        return engine_parameters(self.stage.shape, whole, size, self.mesh.rank % size)


def held_product(layer: torch.nn.Module, like: Tensor) -> Tensor:
    """B A of the buffers of one of vLLM's layers, its matrices one below the other; else zeros."""
    pairs = zip(
        getattr(layer, "lora_a_stacked", ()), getattr(layer, "lora_b_stacked", ()), strict=True
    )
    products = [b[0, 0].double() @ a[0, 0].double() for a, b in pairs]
    return torch.cat(products) if products else torch.zeros_like(like)


def base_tensors(stage: Stage) -> dict[str, Tensor]:
    """The tensors of the policy's folder in the policy's number format."""
    folder = Path(stage.config.model.path)
    return {
        n: t.to(stage.device.params_dtype)
        for n, t in load_file(folder / "model.safetensors").items()
    }


def adapter_products(stage: Stage) -> dict[str, Tensor]:
    """Scale B A of each adapted weight, by PEFT's formula in float64."""
    lora = stage.config.lora
    adapters = {
        name: tensor.double() for name, tensor in whole_tensors(stage, adapters_alone=True).items()
    }
    products = {}
    for name in adapters:
        prefix, _, matrix = name.removesuffix(".weight").rpartition(".")
        if matrix == "lora_A":
            product = adapters[f"{prefix}.lora_B.weight"] @ adapters[name]
            weight_name = prefix.removeprefix("base_model.model.") + ".weight"
            products[weight_name] = lora.alpha / lora.rank * product
    return products


def plain_model(shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> torch.nn.Module:
    """Parameters of these names and nothing else, full of NaN; one column is a vector.

    Buffers of adapters are padded as vLLM's."""
    root = torch.nn.Module()
    for name, (rows, cols) in shapes.items():
        *path, parameter_name = name.split(".")
        is_buffer = parameter_name.isdigit()
        module = root
        for step in path[:-1] if is_buffer else path:
            if step not in module._modules:
                module.add_module(step, torch.nn.Module())
            module = module._modules[step]
        if is_buffer:
            padding = torch.tensor([0, BUFFER_RANK - LORA_RANK])
            size = torch.tensor([rows, cols]) + (padding if "lora_b" in name else padding.flip(0))
            buffer = torch.full((1, 1, *size.tolist()), torch.nan, dtype=dtype)
            setattr(module, path[-1], (*getattr(module, path[-1], ()), buffer))
            continue
        size = (rows,) if cols == 1 else (rows, cols)
        parameter = torch.nn.Parameter(
            torch.full(size, torch.nan, dtype=dtype), requires_grad=False
        )
        module.register_parameter(parameter_name, parameter)
    return root


def target(
    stage: Stage,
    engine_size: int,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int = 40_000,
    keeps_weights: bool = False,
) -> Target:
    """Buckets are small, so that there are many rounds."""
    from rlmath.rollout.weight_sync.weight_sync import WeightTransfer

    mesh = replace(stage.mesh, engine_size=engine_size)
    parallel = stage.config.parallel
    lora = stage.config.lora
    shapes = engine_shapes(stage.shape, engine_size, engine_adapters(stage.shape, lora))
    model = plain_model(shapes, dtype)
    layout = training_layout(stage.shape.num_layers, mesh, parallel)
    weights = EngineWeights(model, shapes)
    sync = WeightTransfer(
        stage.actor.chunks,
        stage.shape,
        layout,
        mesh=mesh,
        device=stage.device,
        weights=weights,
        bucket_bytes=bucket_bytes,
        lora=lora,
        keeps_weights=keeps_weights,
    )
    return Target(model, sync, mesh, stage)


@contextmanager
def no_shared_memory() -> Iterator[None]:
    """This process may make no file of more than a page, and so no memory that it could share."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def stages_of(folder: Path, cases: list[Case]) -> Iterator[tuple[Case, Stage]]:
    """The policy in one layout after the other, over one process group."""
    from megatron.core import parallel_state

    device = open_device("cpu", dtype=cases[0].dtype)
    init_process_group(device, 120.0)
    for case in cases:
        yield case, lay_out(folder, case, device)
        parallel_state.destroy_model_parallel()


def learn(stage: Stage, seed: int) -> None:
    learned = stage.actor.learner.learn(microbatches(stage, make_samples(8, seed=seed)), None, None)
    assert learned.discarded is None


def transfer(
    folder: Path,
    cases: list[Case],
    engine_sizes: tuple[int, ...],
    dtype: torch.dtype,
    messages: bool,
) -> list[dict[str, Any]]:
    """Sync, learn, and sync again.

    Reports what is wrong in the target each time, and what the reports of the syncs count."""
    reports = []
    for case, stage in stages_of(folder, cases):
        with no_shared_memory() if messages else nullcontext():
            targets = [target(stage, size, dtype) for size in engine_sizes]
        wrong = []
        before = {}
        for step in range(3):
            for sync_target in targets:
                sent = sync_target.sync.run(check=step == 1)
                wrong += sync_target.wrong()
            if step == 0:
                before = {name: tensor.clone() for name, tensor in targets[0].parameters.items()}
            if step < 2:
                learn(stage, step)
        reports += [_report(case, sync_target, sent) for sync_target in targets]
        reports[-1]["wrong"] = wrong
        moved = {
            name
            for name, old in before.items()
            if not torch.equal(old, targets[0].parameters[name])
        }
        reports[-1]["moved"] = moved == {name for name in before if _learns(name, case)}
    return reports


def adapters_alone(
    folder: Path, cases: list[Case], engine_sizes: tuple[int, ...], dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Syncs into engines that keep their weights: what is wrong after each, and what was sent.

    Before the second, which follows an update, the engine's base is spoiled: it is not sent again.
    """
    reports = []
    for case, stage in stages_of(folder, cases):
        for size in engine_sizes:
            synced = target(stage, size, dtype, keeps_weights=True)
            first = synced.sync.run(check=True)
            wrong = synced.wrong()
            learn(stage, seed=1)
            base = synced.model.get_submodule("model.norm").weight
            base.data.fill_(7.0)
            second = synced.sync.run(check=True)
            reports.append(
                {
                    "case": f"{case} engines of {size}",
                    "first": wrong,
                    "second": synced.wrong(),
                    "moved": [
                        report.bytes_copied + report.bytes_received for report in (first, second)
                    ],
                    "adapters": sum(
                        buffer.nbytes for buffer in adapter_buffers(synced.model).values()
                    ),
                }
            )
    return reports


def _learns(name: str, case: Case) -> bool:
    """Whether a parameter of vLLM's changes when the policy learns."""
    lora = case.lora
    if lora and case.lora_engine == "adapters":
        return False
    groups = {"attention": ("qkv_proj", "o_proj"), "mlp": ("gate_up_proj", "down_proj")}
    adapted = groups.get(lora or "", sum(groups.values(), ()))
    return lora is None or name.endswith(tuple(f"{module}.weight" for module in adapted))


def _report(case: Case, one: Target, sent: Any) -> dict[str, Any]:
    report = one.sync.run()
    return {
        "case": f"{case} engines of {one.mesh.engine_size}",
        "rounds": one.sync.rounds,
        "bucket": _bucket_bytes(one),
        "lower bound": one.sync.lower_bound,
        "through": type(one.sync._open_transport()).__name__,
        "sent": report.bytes_sent,
        "bytes": sum(parameter.nbytes for parameter in one.parameters.values()),
        "wrong": [],
        "moved": True,
    }


def without_shared_memory_on_one_rank(folder: Path, case: Case) -> tuple[str, list[str]]:
    """How weights travel where only the last rank lacks shared memory, and what is wrong then."""
    stage = build(folder, case)
    with no_shared_memory() if stage.mesh.rank == stage.mesh.world_size - 1 else nullcontext():
        sync_target = target(stage, 1)
    sync_target.sync.run(check=True)
    return type(sync_target.sync._open_transport()).__name__, sync_target.wrong()


def extra_bytes(folder: Path, case: Case, engine_size: int, messages: bool) -> dict[str, int]:
    """Most bytes of tensors that one sync takes beside the shard and the engine's weights."""
    stage = build(folder, case)
    with no_shared_memory() if messages else nullcontext():
        sync_target = target(stage, engine_size)
    sync_target.sync.run()
    with StorageWatch() as watch:
        sync_target.sync.run()
    elements = sum(tensor.numel() for tensor in whole_tensors(stage).values())
    return {
        "peak": watch.peak,
        "left": watch.held,
        "bucket": _bucket_bytes(sync_target),
        "received": max(
            4 * sum(copy.elements for copies in round_.receives.values() for copy in copies)
            for round_ in sync_target.sync._next.rounds
        ),
        "model": elements * 4,
        "merging": max(
            (
                merging_bytes(
                    *matrix.shape, sync_target.sync._sources.merging[name].A[..., 0].numel(), 4
                )
            )
            for name, matrix in sync_target.sync._sources.parameters.items()
            if name in sync_target.sync._sources.merging
        )
        if case.lora
        else 0,
    }


def _bucket_bytes(one: Target) -> int:
    return one.sync._bucket_elements * next(iter(one.parameters.values())).element_size()


def into_vllms_own_model(folder: Path, case: Case) -> dict[str, Any]:
    """Two syncs into vLLM's model class in bfloat16 as a GPU has it, with an update between.

    The model's parameters are what its layers multiply by, nothing is packed. All ranks are one
    engine."""
    from rlmath.rollout.weight_sync.weight_sync import WeightTransfer

    stage = build(folder, case)
    mesh = replace(stage.mesh, engine_size=stage.mesh.world_size)
    with _vllm_model(folder, mesh.engine_size) as model:
        model.load_weights(load_file(folder / "model.safetensors").items())
        of_checkpoint = {
            name: parameter.data.clone() for name, parameter in model.named_parameters()
        }
        before = {
            name: (id(parameter), parameter.data_ptr())
            for name, parameter in model.named_parameters()
        }
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        layout = training_layout(stage.shape.num_layers, mesh)
        weights = EngineWeights(model, engine_shapes(stage.shape, mesh.engine_size))
        sync = WeightTransfer(
            stage.actor.chunks, stage.shape, layout, mesh, stage.device, weights, 40_000
        )
        synced = Target(model, sync, mesh, stage)
        sync.run(check=True)
        unlike = [
            name
            for name, tensor in synced.parameters.items()
            if not torch.equal(tensor, of_checkpoint[name])
        ]
        learn(stage, 0)
        sync.run(check=True)
        after = {
            name: (id(parameter), parameter.data_ptr())
            for name, parameter in model.named_parameters()
        }
        return {
            "parameters": len(before),
            "unlike the checkpoint": unlike,
            "wrong": synced.wrong(),
            "elsewhere": [name for name in before if before[name] != after[name]],
        }


@contextmanager
def _vllm_model(folder: Path, ranks: int) -> Iterator[torch.nn.Module]:
    """vLLM's model of a checkpoint in bfloat16, without its weights.

    It is on one engine of so many ranks."""
    from rlmath.rollout.engine import prepare_environment

    prepare_environment("cpu")
    os.environ["VLLM_DIST_IDENT"] = f"test-{os.environ['MASTER_PORT']}"
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        tensor_parallel_size=ranks,
        distributed_executor_backend="external_launcher",
        enforce_eager=True,
    ).create_engine_config()
    default_dtype = torch.get_default_dtype()
    with set_current_vllm_config(config):
        rank = int(os.environ["RANK"])
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(ranks, 1, backend="gloo")
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(config)
        finally:
            torch.set_default_dtype(default_dtype)
        try:
            yield model
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
