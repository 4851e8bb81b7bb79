"""Run by test_layer_kernels.py in processes that see Triton.

As tests, interpreted: the way of a GPU through Megatron's local layers on CPU tensors gives what
the way of a CPU gives, and its operations are counted; what torch has on GPUs only is written out
below. As a program it compiles the kernels for GPUs and prints what came of it."""

# Shape legend: T packed tokens, H heads, D head dim.

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import megatron.core.tensor_parallel.layers as megatron_layers
import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from triton.runtime.interpreter import InterpretedFunction

import megatron_patches
from rlmath.algorithms.types import Sample
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import AlgorithmConfig, Config, LoraConfig, ModelConfig, PolicyConfig
from rlmath.data.packing import pack
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.models import attention, build, forward_backward, layer_kernels
from rlmath.models.build import build_actor
from rlmath.models.kernels import triton_kernels
from rlmath.models.local_layers import RMSNorm, split_heads, swiglu
from rlmath.models.megatron import start_megatron, stop_megatron

LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
ON_GPU = getattr(megatron_layers, LINEAR)
"""Megatron's own; on CPU a patch replaces it."""
LENGTHS = (5, 3, 9, 3)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}
"""Operations for whose result the host waits."""
ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
}


# ---------------------------------------------------------------- kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rlmath.models.kernels.KERNEL_DEVICES", {"cpu"})
    monkeypatch.setattr(layer_kernels, "PROGRAMS", 3)
    triton_kernels.cache_clear()
    yield
    triton_kernels.cache_clear()


def compare(
    request: pytest.FixtureRequest,
    function: Callable[..., Any],
    inputs: list[Tensor],
    frozen: int = 0,
) -> None:
    """Compare results and gradients of the kernels with those of torch's operations in float64.

    The kernels have fewer programs than tokens. Weights have a buffer as Megatron has it, with
    something in it already; the last `frozen` inputs have neither gradient nor buffer."""
    runs = []
    for exact in (True, False):
        if not exact:
            request.getfixturevalue("kernels")
        parameters = [
            torch.nn.Parameter(tensor.double() if exact else tensor, requires_grad=False)
            for tensor in inputs
        ]
        learning = parameters[: len(parameters) - frozen]
        for parameter in learning:
            parameter.main_grad = torch.ones(parameter.shape)
            parameter.grad_added_to_main_grad = False
            parameter.requires_grad_()
        out = function(*parameters)
        out = out if isinstance(out, tuple) else (out,)
        upstream = [
            drawn(*output.shape, seed=3 + n).to(inputs[0].dtype).to(output.dtype)
            for n, output in enumerate(out)
        ]
        grads = torch.autograd.grad(out, learning, upstream)
        pairs = zip(learning, grads, strict=True)
        runs.append(
            [
                *out,
                *(
                    parameter.main_grad - 1 if parameter.grad_added_to_main_grad else grad
                    for parameter, grad in pairs
                ),
            ]
        )
    for exact, actual in zip(*runs, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=DTYPES[actual.dtype], atol=8e-6)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """The first dimension is the one whose numbers lie side by side."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape[::-1], generator=draw).permute(*range(len(shape))[::-1])


def norm_of(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(
        SimpleNamespace(params_dtype=weight.dtype, sequence_parallel=False), len(weight), eps=1e-3
    )
    norm.weight = weight
    return norm


DTYPES = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
"""Relative error of a result that is rounded once.

The interpreter loses a carry where it rounds to bfloat16."""
WEIGHTS = [*((dtype, False) for dtype in DTYPES), (torch.float32, True)]
"""Formats, and whether weights are frozen."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 6), (2, 2050), (0, 8), (4, 2048)])
def test_swiglu(request: pytest.FixtureRequest, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(request, swiglu, [(4 * drawn(*shape)).to(dtype)])


@pytest.mark.parametrize(("dtype", "frozen"), WEIGHTS)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 6), (8, 70), (0, 8), (5, 64)])
def test_residual_and_norm(
    request: pytest.FixtureRequest,
    shape: tuple[int, ...],
    adds: bool,
    dtype: torch.dtype,
    frozen: bool,
) -> None:
    """Inputs are in eighths, whose sums every format can represent."""

    def both(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return norm_of(inputs[-1]).behind(*inputs[:-1])

    inputs = [drawn(*shape), *[drawn(*shape, seed=3)] * adds, drawn(shape[-1], seed=2)]
    compare(request, both, [((8 * tensor).round() / 8).to(dtype) for tensor in inputs], int(frozen))


@pytest.mark.parametrize(("dtype", "frozen"), WEIGHTS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("R", "G", "D", "F"), [(2, 2, 8, 4), (3, 1, 10, 3), (1, 5, 6, 0)])
def test_heads(
    request: pytest.FixtureRequest,
    R: int,
    G: int,
    D: int,
    F: int,
    biased: bool,
    normed: bool,
    dtype: torch.dtype,
    frozen: bool,
) -> None:
    """Dimensions behind the first 2 F are not rotated."""
    T = 7
    angles = 9 * drawn(T, 1, F).contiguous()

    def split(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        bias, *norm_weights = weights if biased else (None, *weights)
        norms = [norm_of(weight) for weight in norm_weights] if normed else [None, None]
        return split_heads(x, bias, norms, [angles.cos(), angles.sin()])

    weights = [drawn(G * (R + 2) * D, seed=2)] * biased + [
        drawn(D, seed=seed) for seed in (3, 4)
    ] * normed
    inputs = [tensor.to(dtype) for tensor in (drawn(T, G, R + 2, D), *weights)]
    compare(request, split, inputs, len(weights) * frozen)


# ---------------------------------------------------------------- what torch has on GPUs only


def add_product(
    total: Tensor, one: Tensor, other: Tensor, dtype: torch.dtype, *, out: Tensor, **unused: Any
) -> Tensor:
    assert dtype == out.dtype == total.dtype == torch.float32 and one.dtype == other.dtype
    return out.copy_(total + one.float() @ other.float())


def probabilities(query: Tensor, key: Tensor, bounds: Tensor, left: int | None) -> Tensor:
    """[H, T, T] of queries and as many keys."""
    segment_T = torch.bucketize(torch.arange(len(query)), bounds.long(), right=True)
    seen_TT = (segment_T[:, None] == segment_T).tril().triu(-len(query) if left is None else -left)
    scores = torch.einsum("thd,shd->hts", query, key) * query.shape[2] ** -0.5
    return scores.masked_fill(~seen_TT, -torch.inf).softmax(-1)


def repeated(x: Tensor, query: Tensor) -> Tensor:
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], 1)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    of_keys: Tensor,
    *given: Any,
    **window: Any,
) -> tuple[Tensor, ...]:
    longest = int(bounds.diff().max())
    left = window.get("window_size_left")
    assert (
        bounds is of_keys
        and bounds.dtype == torch.int32
        and given == (longest, longest, 0.0, left is None, False)
    )
    assert window.get("window_size_right") == (None if left is None else 0)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    probs = probabilities(query.float(), repeated(key, query), bounds, left)
    out = torch.einsum("hts,shd->thd", probs, repeated(value, query)).to(query.dtype)
    return out.contiguous(), *(query.new_empty(0) for _ in range(4))


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *given: Any, **window: Any
) -> tuple[Tensor, ...]:
    q = query.float()
    up = grad.float()
    k = repeated(key, query)
    v = repeated(value, query)
    p = probabilities(q, k, given[1], window.get("window_size_left"))
    p_grad = torch.einsum("thd,shd->hts", up, v)
    scores_grad = query.shape[2] ** -0.5 * p * (p_grad - (p_grad * p).sum(-1, keepdim=True))
    key_value_grads = [torch.einsum("hts,thd->shd", x, y) for x, y in ((scores_grad, q), (p, up))]
    summed = [tensor.unflatten(1, (key.shape[1], -1)).sum(2) for tensor in key_value_grads]
    gradients = torch.einsum("hts,shd->thd", scores_grad, k), *summed
    return tuple(gradient.to(query.dtype).contiguous() for gradient in gradients)


LIBRARY = torch.library.Library("aten", "IMPL")
for name, function in {
    "addmm.dtype_out": add_product,
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
}.items():
    LIBRARY.impl(name, function, "CPU")


# ---------------------------------------------------------------- counting


class Operations(TorchDispatchMode):
    """Kernels that a GPU would start while it is on, and what the host would wait for, by where.

    Views and allocations are no kernels; several tensors at once count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.where: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        empty = [tensor.numel() == 0 for tensor in tree_iter(out) if isinstance(tensor, Tensor)]
        if name in WAITS or (
            name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        ):
            self.waits[self.place()] += 1
        elif not (
            func.namespace != "aten"
            or func.is_view
            or name in ALLOCATIONS
            or (empty and all(empty))
        ):
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
        """Count the operations inside as one kernel."""
        counts = self.found.copy()
        yield
        self.found = counts + Counter({self.place(): 1})

    def count(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with self.one():
            return function(*given, **named)


@pytest.fixture
def operations(kernels: None, monkeypatch: pytest.MonkeyPatch) -> Operations:
    """The way of a GPU from here on."""
    counter = Operations()
    megatron_patches.apply("cpu")
    monkeypatch.setattr(megatron_layers, LINEAR, ON_GPU)
    monkeypatch.setattr(forward_backward, "finish_computation", lambda device: None)
    monkeypatch.setattr(attention.CPUAttention, "apply", attention.flash_over_segments)
    monkeypatch.setattr(
        Tensor, "tolist", lambda tensor, real=Tensor.tolist: counter.listed(tensor, real)
    )
    run = InterpretedFunction.run
    monkeypatch.setattr(
        InterpretedFunction,
        "run",
        lambda *arguments, **keywords: counter.count(run, *arguments, **keywords),
    )
    return counter


def draw_weights(chunks: Any, *unused: Any, **unused_options: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    for parameter in chunks[0].parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=draw))


def learn(
    device: Device,
    layers: int,
    rank: int = 0,
    policy: PolicyConfig = PolicyConfig(),  # noqa: B008
    count: Operations | None = None,
    **changes: Any,
) -> list[float]:
    """Loss and gradient norm of two minibatches of two micro-batches; the second is counted."""
    shape = ModelShape(
        "Qwen2ForCausalLM",
        layers,
        32,
        4,
        2,
        8,
        48,
        64,
        False,
        64,
        10000.0,
        1e-6,
        True,
        torch_dtype="float32",
    )
    shape = replace(shape, **changes)
    config = Config(
        model=ModelConfig(path="none"),
        algorithm=AlgorithmConfig(kl_coef=0.0),
        policy=policy,
        lora=LoraConfig(rank=rank),
    )
    mesh = Mesh(0, 1, 1, 1, engine_size=1)
    start_megatron(mesh, device, 1, 60.0)
    learner = build_actor(config, shape, mesh, device, 10, (0,)).learner
    step = learner._optimizer_step

    def optimizer_step(*arguments: Any, **named: Any) -> Any:
        if count is not None:
            count.where = "optimizer"
        return step(*arguments, **named)

    learner._optimizer_step = optimizer_step
    draw = torch.Generator().manual_seed(2)
    samples = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, 64, (length,), generator=draw).tolist()
        completion_tokens = length - length // 3
        samples.append(
            Sample(
                tuple(ids[:-completion_tokens]),
                tuple(ids[-completion_tokens:]),
                (-4.0,) * completion_tokens,
                (-1.0) ** number,
            )
        )
    batches = [pack(samples, numbers, 1) for numbers in ((0, 1, 2), (3, 2))]
    results = [learner.learn(batches, None, None)]
    if count is None:
        results.append(learner.learn(batches, None, None))
    else:
        count.found = Counter()
        count.waits = Counter()
        count.where = None
        with count:
            learner.learn(batches, None, None)
    stop_megatron()
    return [value for result in results for value in (result.sums["loss"], result.grad_norm)]


CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
GPU = Device("cuda", torch.device("cpu"), "gloo", torch.float32)
EVERY_LAYER = PolicyConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
QWEN3 = {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "attention_bias": False}
MODELS = [
    {"layers": 2},
    {"layers": 1, "tied_embeddings": True, "rotary_dim": 4},
    {"layers": 2, "sliding_window": 3, "full_attention_layers": (1,), "no_rope_layers": (0,)},
    {"layers": 2, "policy": PolicyConfig(recompute_granularity="selective")} | QWEN3,
    {"layers": 2, "rank": 2, "policy": EVERY_LAYER},
]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[float]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    build.load_hf_weights = draw_weights
    return [learn(CPU, **model) for model in MODELS]


def test_a_gpu_learns_what_a_cpu_learns(on_cpu: list[list[float]], operations: Operations) -> None:
    """Loss and gradient norm before and after an update, in float32: rounding aside."""
    for model, expected in zip(MODELS, on_cpu, strict=True):
        assert learn(GPU, **model) == pytest.approx(expected, rel=2e-5), model


def test_few_operations_and_none_to_wait_for(
    on_cpu: list[list[float]], operations: Operations
) -> None:
    """A layer in bfloat16 takes 10 operations forward and 16 backward.

    Forward: 2 norms, one with a residual, 4 products, split heads, attention, SwiGLU, a residual.
    Backward: 8 products, the 5 others once, and 3 gradients that no product adds to their buffers.
    """
    counts = []
    for layers in (1, 3):
        learn(replace(GPU, params_dtype=torch.bfloat16), layers, count=operations)
        counts.append(dict(operations.found))
    a_layer = {
        phase: (counts[1][phase] - counts[0][phase]) / 4 for phase in ("forward", "backward")
    }
    assert a_layer == {"forward": 10, "backward": 16}
    assert counts[0]["optimizer"] == counts[1]["optimizer"]
    most = {"forward": 340, "backward": 98, "optimizer": 23}
    assert all(number <= most[phase] for phase, number in counts[0].items()), counts[0]
    # Once a minibatch, for the denominator.
    assert [operations.waits[phase] for phase in ("forward", "backward")] == [1, 0]


# ---------------------------------------------------------------- compiled for a GPU


class Layer(NamedTuple):
    """A layer whose kernels are launched.

    T tokens, hidden size, query heads of a group, head dim, feed-forward units."""

    T: int
    H: int
    R: int
    D: int
    U: int
    normed: bool = False
    """Whether heads are normed, and have no bias."""
    frozen: bool = False


LAYERS = [
    Layer(64, 896, 7, 64, 4864),  # Qwen2.5-0.5B
    Layer(64, 1536, 6, 128, 8960),
    Layer(64, 8192, 16, 128, 28672, normed=True),
    Layer(
        1, 1024, 1, 32, 64, normed=True, frozen=True
    ),  # Triton makes another program for a number that is 1
]


def launch_all(layer: Layer) -> None:
    """All kernels, both ways."""
    T, H, R, D, U, normed, frozen = layer

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)

    def weight(size: int) -> Tensor:
        parameter = torch.nn.Parameter(empty(size), requires_grad=not frozen)
        parameter.main_grad = torch.empty(size)
        return parameter

    norms = [norm_of(weight(D)) if normed else None for _ in range(2)]
    angles = [torch.empty(T, 1, D // 2) for _ in range(2)]
    heads = split_heads(
        empty(T, 2, R + 2, D), None if normed else weight(2 * (R + 2) * D), norms, angles
    )
    out = (
        *norm_of(weight(H)).behind(empty(T, 1, H), empty(T, 1, H)),
        *heads,
        swiglu(empty(T, 1, 2 * U)),
    )
    torch.autograd.backward(out, [torch.empty_like(output) for output in out])


def main() -> None:
    """Print a line for each kernel of each layer, on each architecture.

    It has what the machine code takes, and uses of a row's number in the 32 bits that it comes in.
    """
    from tests.models.logprob_kernel_cases import (
        NoGPU,
        resources,
    )  # which sends tensors on a CPU to kernels

    run = triton.JITFunction.run

    def only_compile(kernel: triton.JITFunction, *given: Any, **more: Any) -> None:
        compiled = run(kernel, *given, **more | {"warmup": True})
        row = re.search(r"(%\w+) = tt\.get_program_id x", compiled.asm["ttir"])[1]
        narrow = re.findall(rf".* = (?!arith\.extsi).*{row}\b.*", compiled.asm["ttir"])
        usage = resources(compiled) | {"narrow_rows": len(narrow)}
        print(json.dumps([arch, layer, compiled.metadata.num_warps, kernel.__name__, usage]))

    triton.JITFunction.run = only_compile
    for arch in (80, 90):
        triton.runtime.driver.set_active(NoGPU(arch))
        for layer in LAYERS:
            launch_all(layer)


if __name__ == "__main__":
    main()
