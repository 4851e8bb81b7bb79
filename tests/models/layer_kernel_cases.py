"""Run by test_layer_kernels.py in processes that see Triton. As tests, interpreted: the way of a GPU through Megatron's
local layers on CPU tensors gives what the way of a CPU gives, and its operations are counted; what torch has on GPUs
only is written out below. As a program it compiles the kernels for GPUs and prints what came of it."""

# Shape legend: T packed tokens, H heads, D head dim.

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.tensor_parallel.layers as megatron_layers
import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import megatron_patches
from rlmath.algorithms.types import Sample
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import AlgorithmConfig, Config, ModelConfig
from rlmath.data.packing import pack
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.models import (
    attention,
    build,
    forward_backward,
    layer_kernels,
    local_layers,
    logprob_kernels,
    logprobs,
)
from rlmath.models.build import build_actor
from rlmath.models.local_layers import rotate, swiglu
from rlmath.models.megatron import start_megatron, stop_megatron

LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
ON_GPU = getattr(megatron_layers, LINEAR)
"""Megatron's own; on CPU a patch replaces it."""
LENGTHS = (5, 3, 9, 3)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}
"""Operations for whose result the host waits."""
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


# ---------------------------------------------------------------- kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(local_layers, "KERNEL_DEVICES", {"cpu"})
    local_layers._kernels.cache_clear()
    yield
    local_layers._kernels.cache_clear()


def both_ways(
    kernels: pytest.FixtureRequest, function: Callable[..., Any], inputs: list[Tensor]
) -> list[list[Tensor]]:
    """Results and gradients by torch's operations in float64, and by the kernels."""
    found = []
    for exact in (True, False):
        if not exact:
            kernels.getfixturevalue("kernels")
        given = [(x.double() if exact else x).requires_grad_() for x in inputs]
        out = function(*given)
        out = out if isinstance(out, tuple) else (out,)
        draw = torch.Generator().manual_seed(3)
        upstream = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in out]
        found.append([*out, *torch.autograd.grad(out, given, upstream)])
    return found


DTYPES = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Of a result that is rounded once, relative: the interpreter loses a carry where it rounds to bfloat16."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 6), (2, 2050), (0, 8), (4, 2048)])
def test_swiglu(request: pytest.FixtureRequest, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    for exact, found in zip(*both_ways(request, swiglu, [x]), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=DTYPES[dtype], atol=4 * DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "D", "F"), [(4, 2, 8, 4), (3, 1, 10, 3), (5, 5, 6, 3)])
def test_rotation(
    request: pytest.FixtureRequest, heads: int, groups: int, D: int, F: int, dtype: torch.dtype
) -> None:
    """Heads lie apart, as in a projection of queries, keys and values; behind 2 F dims nothing turns."""
    draw = torch.Generator().manual_seed(1)
    whole = torch.randn(7, heads + groups + 2, D, generator=draw).to(dtype)
    angles = 9 * torch.rand(7, 1, F, generator=draw)

    def turned(x: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(x[:, 1 : 1 + heads], x[:, heads + 1 : -1], angles.cos(), angles.sin())

    for exact, found in zip(*both_ways(request, turned, [whole]), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=DTYPES[dtype], atol=2 * DTYPES[dtype])


# ---------------------------------------------------------------- what torch has on GPUs only


def add_product(
    total: Tensor, one: Tensor, other: Tensor, dtype: torch.dtype, *, out: Tensor, **unused: Any
) -> Tensor:
    assert dtype == out.dtype == total.dtype == torch.float32 and one.dtype == other.dtype
    return out.copy_(total + one.float() @ other.float())


def norm(x: Tensor, size: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.float() * r * weight.float()).to(x.dtype), r


def norm_backward(
    grad: Tensor, x: Tensor, size: list[int], r: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor]:
    up, normed = grad.float() * weight.float(), x.float() * r
    grad_x = r * (up - normed * (up * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad.float() * normed).flatten(0, -2).sum(0).to(x.dtype)


def probabilities(query: Tensor, key: Tensor, bounds: Tensor, left: int | None) -> Tensor:
    """[H, T, T] of queries and as many keys."""
    segment_T = torch.bucketize(torch.arange(len(query)), bounds.long(), right=True)
    seen_TT = (segment_T[:, None] == segment_T).tril().triu(-len(query) if left is None else -left)
    scores = torch.einsum("thd,shd->hts", query, key) * query.shape[2] ** -0.5
    return scores.masked_fill(~seen_TT, -torch.inf).softmax(-1)


def repeated(x: Tensor, query: Tensor) -> Tensor:
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], 1)


def flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, of_keys: Tensor, *given: Any, **window: Any
) -> tuple[Tensor, ...]:
    most, left = int(bounds.diff().max()), window.get("window_size_left")
    assert (
        bounds is of_keys and bounds.dtype == torch.int32 and given == (most, most, 0.0, left is None, False)
    )
    assert window.get("window_size_right") == (None if left is None else 0)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    probs = probabilities(query.float(), repeated(key, query), bounds, left)
    out = torch.einsum("hts,shd->thd", probs, repeated(value, query)).to(query.dtype)
    return out, *(query.new_empty(0) for _ in range(4))


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *given: Any, **window: Any
) -> tuple[Tensor, ...]:
    q, up, k, v = query.float(), grad.float(), repeated(key, query), repeated(value, query)
    p = probabilities(q, k, given[1], window.get("window_size_left"))
    of_p = torch.einsum("thd,shd->hts", up, v)
    of_scores = query.shape[2] ** -0.5 * p * (of_p - (of_p * p).sum(-1, keepdim=True))
    of_keys = [torch.einsum("hts,thd->shd", x, y) for x, y in ((of_scores, q), (p, up))]
    summed = [x.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype) for x in of_keys]
    return torch.einsum("hts,shd->thd", of_scores, k).to(query.dtype), *summed


LIBRARY = torch.library.Library("aten", "IMPL")
for name, function in {
    "addmm.dtype_out": add_product,
    "_fused_rms_norm": norm,
    "_fused_rms_norm_backward": norm_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
}.items():
    LIBRARY.impl(name, function, "CPU")


# ---------------------------------------------------------------- counting


class Operations(TorchDispatchMode):
    """Kernels that a GPU would start while it is on, and what the host would wait for, by where. Views and allocations
    are no kernels; several tensors at once count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.where: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        empty = [one.numel() == 0 for one in tree_iter(out) if isinstance(one, Tensor)]
        if name in WAITS or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            self.waits[self.place()] += 1
        elif not (func.namespace != "aten" or func.is_view or name in ALLOCATIONS or (empty and all(empty))):
            self.found[self.place()] += 1
        return out

    def listed(self, tensor: Tensor, tolist: Callable[[Tensor], Any]) -> Any:
        self.waits[self.place()] += 1
        return tolist(tensor)

    def place(self) -> str:
        in_backward = torch._C._current_autograd_node() is not None
        return self.where or ("backward" if in_backward else "forward")

    @contextmanager
    def one(self) -> Iterator[None]:
        """What is inside is one kernel."""
        found = self.found.copy()
        yield
        self.found = found + Counter({self.place(): 1})

    def count(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with self.one():
            return function(*given, **named)


@pytest.fixture
def operations(kernels: None, monkeypatch: pytest.MonkeyPatch) -> Operations:
    """The way of a GPU from here on."""
    found = Operations()
    megatron_patches.apply("cpu")
    monkeypatch.setattr(megatron_layers, LINEAR, ON_GPU)
    monkeypatch.setattr(forward_backward, "finish_computation", lambda device: None)
    monkeypatch.setattr(attention._CPUAttention, "apply", attention.flash_over_segments)
    monkeypatch.setattr(torch, "rms_norm", lambda *given: torch.ops.aten._fused_rms_norm(*given)[0])
    monkeypatch.setattr(local_layers, "EXACT", ())
    monkeypatch.setattr(Tensor, "tolist", lambda x, real=Tensor.tolist: found.listed(x, real))
    monkeypatch.setattr(logprobs, "KERNEL_DEVICES", {"cpu"})
    for module, names in {
        layer_kernels: ("swiglu", "swiglu_gradient", "rotated"),
        logprob_kernels: ("shard_sums", "overwrite_with_gradient"),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, partial(found.count, getattr(module, name)))
    return found


def draw_weights(chunks: Any, *unused: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    for parameter in chunks[0].parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=draw))


def learn(
    device: Device,
    layers: int,
    tied: bool = False,
    window: int | None = None,
    count: Operations | None = None,
) -> list[float]:
    """Loss and gradient norm of two minibatches of two micro-batches; the second is counted."""
    shape = ModelShape(
        "Qwen2ForCausalLM", layers, 32, 4, 2, 8, 48, 64, tied, 64, 10000.0, 1e-6, True, torch_dtype="float32"
    )
    if window is not None:
        shape = replace(shape, sliding_window=window)
    config = Config(model=ModelConfig(path="none"), algorithm=AlgorithmConfig(kl_coef=0.0))
    mesh = Mesh(0, 1, 1, 1, engine_size=1)
    start_megatron(mesh, device, 1, 60.0)
    learner = build_actor(config, shape, mesh, device, 10, (0,)).learner
    step = learner._optimizer_step

    def optimizer_step(*given: Any) -> Any:
        if count is not None:
            count.where = "optimizer"
        return step(*given)

    learner._optimizer_step = optimizer_step
    draw = torch.Generator().manual_seed(2)
    samples = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, 64, (length,), generator=draw).tolist()
        rest = length - length // 3
        samples.append(Sample(tuple(ids[:-rest]), tuple(ids[-rest:]), (-4.0,) * rest, (-1.0) ** number))
    batches = [pack(samples, numbers, 1) for numbers in ((0, 1, 2), (3, 2))]
    results = [learner.learn(batches, None, None)]
    if count is None:
        results.append(learner.learn(batches, None, None))
    else:
        count.found, count.waits, count.where = Counter(), Counter(), None
        with count:
            learner.learn(batches, None, None)
    stop_megatron()
    return [value for one in results for value in (one.sums["loss"], one.grad_norm)]


CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
GPU = Device("cuda", torch.device("cpu"), "gloo", torch.float32)
MODELS = [{"layers": 2}, {"layers": 1, "tied": True}, {"layers": 2, "window": 3}]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[float]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    build.load_hf_weights = draw_weights
    return [learn(CPU, **model) for model in MODELS]


def test_a_gpu_learns_what_a_cpu_learns(on_cpu: list[list[float]], operations: Operations) -> None:
    """Loss and gradient norm before and after an update, in float32: rounding aside."""
    for model, wanted in zip(MODELS, on_cpu, strict=True):
        assert learn(GPU, **model) == pytest.approx(wanted, rel=2e-5), model


def test_few_operations_and_none_to_wait_for(on_cpu: list[list[float]], operations: Operations) -> None:
    """In bfloat16. Of a layer: 2 norms, 4 products and a bias, the query's copy, rotation, attention, SwiGLU, 2
    residuals; backward 8 products, 7 others each way once, the bias's sum, 3 gradients that no product adds to their
    buffers, 2 residuals."""
    counts = []
    for layers in (1, 3):
        learn(replace(GPU, params_dtype=torch.bfloat16), layers, count=operations)
        counts.append(dict(operations.found))
    a_layer = {where: (counts[1][where] - counts[0][where]) / 4 for where in ("forward", "backward")}
    assert a_layer == {"forward": 14, "backward": 20}
    assert counts[0]["optimizer"] == counts[1]["optimizer"]
    most = {"forward": 350, "backward": 108, "optimizer": 23}
    assert all(number <= most[where] for where, number in counts[0].items()), counts[0]
    # Once a minibatch, for the denominator.
    assert [operations.waits[where] for where in ("forward", "backward")] == [1, 0]


# ---------------------------------------------------------------- compiled for a GPU


WHOLE = ("U", "H", "G", "D", "F", "sign", "query_token", "query_head", "key_token", "key_head")
"""Arguments that are whole numbers; cosines and sines are pointers to float32, the others to bfloat16."""
HEADS = {"HEADS": 16, "KEY_HEADS": 4, "FREQUENCIES": 64, "REST": 0}
COMPILED = [
    (layer_kernels._swiglu, {"BLOCK": layer_kernels.BLOCK}),
    (layer_kernels._swiglu_gradient, {"BLOCK": layer_kernels.BLOCK}),
    (layer_kernels._rotate, HEADS),
    (layer_kernels._rotate, HEADS | {"FREQUENCIES": 32, "REST": 64}),
]


def resources(kernel: Any, constants: dict[str, int], arch: int) -> dict[str, int]:
    """Stack of a thread, and loads of 16 bytes, of the machine code for a GPU of that architecture."""
    types = {
        name: "i32" if name in WHOLE else "*fp32" if name in ("cos", "sin") else "*bf16"
        for name in kernel.arg_names
    } | dict.fromkeys(constants, "constexpr")
    divisible = [name for name in kernel.arg_names if name not in ("H", "G", "sign", *constants)]
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(kernel, types, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "kernel.cubin"]
    told = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(number) for name, number in re.findall(r"(STACK|LOCAL):(\d+)", told)}
    return found | {"wide_loads": compiled.asm["ptx"].count("ld.global.v4")}


if __name__ == "__main__":
    for kernel, constants in COMPILED:
        for arch in (80, 90):
            print(json.dumps([kernel.__name__, constants, arch, resources(kernel, constants, arch)]))
