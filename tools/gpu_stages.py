"""What tools/gpu_check.py measures, a stage in each process: it prints a JSON line per figure as soon as it is known.

    python tools/gpu_stages.py step --device cuda --folder /tmp/check [--quick]

A line has "what", "value", "unit", and where something is expected "expected" and "holds". Without a GPU the stages
that the CPU can run take a tiny model, in bfloat16 where the GPU would.
"""

# Shape legend: T packed tokens, V vocabulary.

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from rlmath.algorithms.types import Sample
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
)
from rlmath.data.packing import pack
from rlmath.data.seqlen_balancing import training_cost
from rlmath.distributed.device import (
    Device,
    device_bytes,
    init_process_group,
    open_device,
    prepare_imports,
    release_cached,
    synchronize,
)
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.peak_flops import gpu_peak, peak_flops
from rlmath.models.hf_config import read_model_shape
from rlmath.models.logprobs import CHUNK_BYTES
from rlmath.trainer.preflight.memory_estimate import ENGINE_PARTS, MemoryPlan, Target, plan_rank
from rlmath.trainer.preflight.memory_fit import RESERVE_GIB, RESERVE_SHARE

REPOSITORY = Path(__file__).resolve().parents[1]
GIB = 2**30
BF16_NATS = 0.05
"""Most by which a log-prob in bfloat16 may differ from float32's on average over a sequence's tokens (nats)."""
BF16_NATS_AFTER = 0.2
"""Likewise of one log-prob after a step of Adam, whose first step moves every weight by the learning rate in the
direction of its gradient's sign, also where the gradient is no more than rounding (0.08 were seen)."""
BF16_GRADIENT = 0.02
"""Most by which the norm of a gradient may differ likewise (share)."""
PLAN_SHARE = 0.1
"""Most by which torch's peak may be above the memory plan (share)."""
QWEN = {
    "tiny": (128, 256, 4, 4, 2, 512),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
}
"""Qwen2.5's shapes: hidden size, width of the feed-forward layers, layers, heads, heads of keys and values,
vocabulary."""
WORLD = Mesh(0, 1, 1, 1, 1)
CHUNKS_TO_TRY_MIB = (64, 128)
"""Sizes of log-prob chunks that are measured beside the one that is used."""


def tell(
    what: str, value: float | str, unit: str = "", expected: str = "", holds: bool | None = None
) -> None:
    """A figure, at once: what is measured stays known where the stage fails later."""
    if isinstance(value, float):
        value = float(f"{value:.4g}")
    line = {"what": what, "value": value, "unit": unit, "expected": expected, "holds": holds}
    print(json.dumps(line), flush=True)


# ---------------------------------------------------------------- models and samples


def random_model(folder: Path, size: str) -> Path:
    """A random Qwen2 in Hugging Face form with the demo's tokenizer, made once: in float32 where it is small, for
    comparisons."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tools.make_tiny_model import make_tokenizer

    place = folder / f"model-{size}"
    if (place / "config.json").exists():
        return place
    hidden, width, layers, heads, groups, vocabulary = QWEN[size]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        tie_word_embeddings=size != "tiny",
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(before)
    unfinished = folder / f"model-{size}.unfinished"
    model.save_pretrained(unfinished)
    make_tokenizer().save_pretrained(unfinished)
    unfinished.rename(place)
    return place


def make_samples(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Samples of `length` tokens, a quarter of them the prompt's, the same on every device."""
    draw = torch.Generator().manual_seed(count * length)
    prompt = length // 4
    samples = []
    for number in range(count):
        ids = torch.randint(3, vocabulary, (length,), generator=draw).tolist()
        advantage = 1.0 if number % 2 else -0.5
        behaviour = (-6.0,) * (length - prompt)
        samples.append(Sample(tuple(ids[:prompt]), tuple(ids[prompt:]), behaviour, advantage))
    return samples


def settings(model: Path, device: Device, tokens: int, recompute: str | None = None) -> Config:
    """Of one rank that trains with `tokens` in a micro-batch."""
    layers = {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}
    return Config(
        run=RunConfig(device=device.kind),
        model=ModelConfig(path=str(model)),
        policy=PolicyConfig(
            max_tokens_per_microbatch=tokens,
            recompute_granularity=recompute,
            transformer_impl="local" if device.local_layers else "transformer_engine",
            **layers,
        ),
        optimizer=OptimizerConfig(lr=1e-6),
        algorithm=AlgorithmConfig(early_stop_ratio=None),
        memory=MemoryConfig(),
        rollout=RolloutConfig(
            group_size=8, max_new_tokens=256, max_num_seqs=256, cpu_kv_cache_gib=0.25, progress_bar=False
        ),
    )


@contextmanager
def one_rank(kind: str, local_layers: bool, dtype: torch.dtype | None = None) -> Iterator[Device]:
    """The process group of one rank, and Megatron's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    device = open_device(kind, local_layers)
    if dtype is not None:
        device = replace(device, params_dtype=dtype)
    init_process_group(device, 600.0)
    from rlmath.models.megatron import start_megatron

    start_megatron(WORLD, device, 1, 600.0)
    yield device
    if dist.is_initialized():
        dist.destroy_process_group()


def has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


# ---------------------------------------------------------------- the machine


def machine(given: argparse.Namespace) -> None:
    """What the GPU is, and what its matrix units and memory reach."""
    if given.device == "cpu":
        prepare_imports("cpu")
        torch.set_num_threads(1)
        tell(
            "float32 product of 1,024 x 1,024 x 1,024",
            product_flops("cpu", torch.float32, 1024) / 1e9,
            "GFLOP/s",
        )
        return
    name, properties = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    tell("GPU", name)
    tell(
        "compute capability",
        f"{properties.major}.{properties.minor}",
        expected="8.0 or newer",
        holds=properties.major >= 8,
    )
    tell("memory", total / GIB, "GiB")
    tell(
        "memory in use by the driver's count, CUDA started",
        (total - free) / GIB,
        "GiB",
        "1.5 at most",
        total - free < 1.5 * GIB,
    )
    reached = product_flops("cuda", torch.bfloat16, 8192)
    peak = gpu_peak(name)
    tell(
        "bfloat16 product of 8,192 x 8,192 x 8,192",
        reached / 1e12,
        "TFLOP/s",
        f"{peak / 1e12:.0f} at most" if peak else "",
    )
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    tell(
        "copy on the device, read and written",
        2 * 2**30 / seconds_of(lambda: target.copy_(source)) / 1e9,
        "GB/s",
    )
    pinned = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    tell("copy to pinned host memory", 2**30 / seconds_of(lambda: pinned.copy_(source)) / 1e9, "GB/s")


def product_flops(device: str, dtype: torch.dtype, size: int) -> float:
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: left @ right)


def seconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Median duration after two calls that are not counted (seconds)."""
    durations = []
    for number in range(repeats + 2):
        wait()
        started = time.perf_counter()
        work()
        wait()
        if number > 1:
            durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---------------------------------------------------------------- the policy against float32


def policy(given: argparse.Namespace) -> None:
    """Local layers in bfloat16 against the same in float32 on CPU."""
    compare(given, {"device": given.device, "layers": "local", "dtype": "bfloat16"})


def transformer_engine(given: argparse.Namespace) -> None:
    """Transformer Engine's layers against local ones in float32 on CPU."""
    compare(given, {"device": "cuda", "layers": "transformer_engine", "dtype": "bfloat16"})


def compare(given: argparse.Namespace, case: dict[str, str]) -> None:
    model = random_model(given.folder, "tiny")
    exact = in_own_process(model, {"device": "cpu", "layers": "local", "dtype": "float32"})
    found = in_own_process(model, case)
    title = f"{case['layers']} layers, {case['dtype']} on {case['device']} against float32 on CPU"
    for name, most in (("before", BF16_NATS), ("after", BF16_NATS_AFTER)):
        differences = [abs(a - b) for a, b in zip(exact[name], found[name], strict=True)]
        mean, largest = sum(differences) / len(differences), max(differences)
        of = f"{title}: log-probs {name} an update"
        tell(f"{of}, mean difference", mean, "nats", f"{BF16_NATS / 5:g} at most", mean <= BF16_NATS / 5)
        tell(f"{of}, largest", largest, "nats", f"{most} at most", largest <= most)
    share = found["grad_norm"] / exact["grad_norm"] - 1
    tell(
        f"{title}: norm of the gradient",
        share,
        "share",
        f"within {BF16_GRADIENT}",
        abs(share) <= BF16_GRADIENT,
    )


def in_own_process(model: Path, case: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "measure_policy", "--folder", str(model), "--case", json.dumps(case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_policy(given: argparse.Namespace) -> None:
    """Log-probs before and after an update, and the norm of its gradient, as the last line."""
    case = json.loads(given.case)
    with one_rank(case["device"], case["layers"] == "local", getattr(torch, case["dtype"])) as device:
        from rlmath.models.build import build_actor

        shape = read_model_shape(given.folder)
        config = settings(given.folder, device, 512)
        config = replace(config, optimizer=OptimizerConfig(lr=1e-4))
        actor = build_actor(config, shape, WORLD, device, 10, (1,))
        samples = make_samples(16, 96, shape.vocab_size)
        batches = [pack(samples, range(start, start + 4), 1) for start in range(0, 16, 4)]

        def logprobs() -> list[float]:
            found = actor.forward_backward.logprobs(batches)
            pairs = zip(found, batches, strict=True)
            return [
                x
                for one, batch in pairs
                for x in one.logprobs_T[batch.loss_weights_T.to(one.logprobs_T.device) > 0].tolist()
            ]

        before = logprobs()
        result = actor.learner.learn(batches, None, None)
        print(json.dumps({"before": before, "after": logprobs(), "grad_norm": result.grad_norm}))


def logprobs(given: argparse.Namespace) -> None:
    """Memory and time of log-probs over Qwen2.5's vocabulary, by tools/bench_logprobs.py."""
    command = [sys.executable, "tools/bench_logprobs.py", "--device", given.device]
    command += ["--quick"] if given.quick or given.device == "cpu" else []
    default = CHUNK_BYTES[given.device] // 2**20
    if given.device == "cuda":
        command += ["--chunk-mib", *map(str, sorted({default, *CHUNKS_TO_TRY_MIB}))]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            row = json.loads(line)
            tell(
                f"log-probs, {row['case']}: {row['metric']}",
                row["value"],
                row["unit"],
                row["baseline"],
                row["ratio"] > 0.95 if row["case"].endswith(f"chunks of {default} MiB") else None,
            )
    if running.returncode:
        raise SystemExit(f"tools/bench_logprobs.py ended with {running.returncode}")


# ---------------------------------------------------------------- training


def step(given: argparse.Namespace) -> None:
    """An optimizer step of a model of 0.5B to 1.5B random weights: speed, and memory beside the plan."""
    for size in sizes(given):
        tokens, length = (512, 128) if size == "tiny" else (16_384, 2048)
        train_in_own_process(given, size, tokens, length, None)


def packed(given: argparse.Namespace) -> None:
    """One sequence of 16,384 and of 32,768 tokens a micro-batch, with what is recomputed."""
    size = sizes(given)[-1]
    for tokens in (1024, 2048) if size == "tiny" else (16_384, 32_768):
        for recompute in (None, "selective", "full"):
            train_in_own_process(given, size, tokens, tokens, recompute)


def train_in_own_process(
    given: argparse.Namespace, size: str, tokens: int, length: int, recompute: str | None
) -> None:
    """`train`; what did not run, for want of memory for example, is a line, and the next case runs."""
    case = {"size": size, "tokens": tokens, "length": length, "recompute": recompute}
    command = [sys.executable, __file__, "train_case", "--device", given.device]
    command += ["--folder", str(given.folder), "--case", json.dumps(case)]
    sys.stdout.flush()
    status = subprocess.run(command, check=False).returncode
    if status:
        tell(f"{case_title(**case)}: exit status", str(status), expected="0", holds=False)


def case_title(size: str, tokens: int, length: int, recompute: str | None) -> str:
    return f"{size}, sequences of {length:,} in {tokens:,} tokens, {recompute or 'nothing'} recomputed"


def train_case(given: argparse.Namespace) -> None:
    train(given, **json.loads(given.case))


def sizes(given: argparse.Namespace) -> list[str]:
    if given.device == "cpu":
        return ["tiny"]
    return ["0.5B"] if given.quick else ["0.5B", "1.5B"]


def train(given: argparse.Namespace, size: str, tokens: int, length: int, recompute: str | None) -> None:
    """Two micro-batches of `tokens`, of sequences of `length`; the median of three steps after the first."""
    local = given.device == "cpu" or not has_transformer_engine()
    title = f"{case_title(size, tokens, length, recompute)}, {'local' if local else 'TE'} layers"
    model = random_model(given.folder, size)
    shape = read_model_shape(model)
    with one_rank(given.device, local) as device:
        from rlmath.models.build import build_actor

        config = settings(model, device, tokens, recompute)
        plan = plan_rank(config, shape, WORLD, Target(device.kind, "GPU", None, local))
        if device.kind == "cuda" and training_bytes(plan) > 0.95 * torch.cuda.mem_get_info()[1]:
            tell(f"{title}: planned, more than the GPU has", training_bytes(plan) / GIB, "GiB")
            return
        actor = build_actor(config, shape, WORLD, device, 10, (1,))
        if device.kind == "cuda":
            tell_fusion(device)
        samples = make_samples(2 * tokens // length, length, shape.vocab_size)
        half = len(samples) // 2
        batches = [pack(samples, range(half), 1), pack(samples, range(half, 2 * half), 1)]

        def learn() -> None:
            assert actor.learner.learn(batches, None, None, True).discarded is None

        learn()
        release_cached(device)
        if device.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(learn, 3)
        tell(f"{title}: update", 2 * tokens / seconds, "tokens/s")
        work = sum(training_cost(shape).of(sample.length) for sample in samples)
        ceiling = (
            product_flops("cuda", torch.bfloat16, 8192)
            if device.kind == "cuda"
            else peak_flops(shape, WORLD, device)
        )
        assert ceiling is not None
        tell(f"{title}: MFU over the measured product", work / seconds / ceiling, "share")
        if device.kind == "cuda":
            tell_memory(title, plan, device)


def tell_fusion(device: Device) -> None:
    """Whether apex's kernel adds gradients up; only where it is installed it should."""
    from rlmath.models.megatron import fuses_gradient_accumulation

    installed = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    fused = fuses_gradient_accumulation(device)
    expected = "True" if installed else "apex is not installed"
    tell("apex's kernel adds gradients up", str(fused), expected=expected, holds=fused if installed else None)


def training_bytes(plan: MemoryPlan) -> int:
    """What the plan has for an update, without the engine's parts."""
    return sum(size for part, size in plan.phases["update"].items() if part not in ENGINE_PARTS)


def tell_memory(title: str, plan: MemoryPlan, device: Device) -> None:
    """The update of the plan beside torch's peak, and all that the driver counts."""
    planned = training_bytes(plan)
    peak = torch.cuda.max_memory_allocated()
    holds = peak <= planned * (1 + PLAN_SHARE)
    tell(f"{title}: torch's peak", peak / GIB, "GiB", f"{planned / GIB:.2f} planned", holds)
    reserved = torch.cuda.max_memory_reserved()
    tell(f"{title}: reserved for it", reserved / GIB, "GiB", "15% more at most", reserved <= 1.15 * peak)
    beyond = (device_bytes(device) - torch.cuda.memory_reserved()) / GIB
    room = RESERVE_GIB + RESERVE_SHARE * torch.cuda.mem_get_info()[1] / GIB
    tell(
        f"{title}: driver's count beyond what torch reserves",
        beyond,
        "GiB",
        f"{room:.1f} left free for it",
        beyond <= room,
    )


# ---------------------------------------------------------------- the engine


def engine(given: argparse.Namespace) -> None:
    """vLLM beside the policy: a rollout, weights synced in place under CUDA graphs, sleep and wake."""
    size = sizes(given)[-1]
    model = random_model(given.folder, size)
    local = given.device == "cpu" or not has_transformer_engine()
    with one_rank(given.device, local) as device:
        from rlmath.models.build import build_actor
        from rlmath.rollout.engine import Engine, samples_in_one_kernel
        from rlmath.rollout.sampling import Request
        from rlmath.rollout.weight_sync.shard_layouts import engine_shapes, training_layout
        from rlmath.rollout.weight_sync.weight_sync import WeightTransfer

        shape, config = read_model_shape(model), settings(model, device, 512)
        count, prompt_tokens, new_tokens = (16, 8, 32) if size == "tiny" else (256, 128, 256)
        exactly = replace(config.rollout, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
        config = replace(config, optimizer=OptimizerConfig(lr=1e-4), rollout=exactly)
        actor = build_actor(config, shape, WORLD, device, 10, (1,))
        prompts = [s.prompt_ids for s in make_samples(count, 4 * prompt_tokens, shape.vocab_size)]
        requests = [Request((n, 0), ids, n, new_tokens, new_tokens) for n, ids in enumerate(prompts)]
        started = time.perf_counter()
        built = Engine(str(model), config.rollout, 512, WORLD, device, engine_shapes(shape, 1))
        tell(f"{size}: engine built", time.perf_counter() - started, "s")
        if device.kind == "cuda":
            one_kernel = samples_in_one_kernel(built._llm)
            tell("noise of all requests in one kernel", str(one_kernel), expected="True", holds=one_kernel)
        timed(f"{size}: sleep", built.memory.sleep, device)
        layout = training_layout(shape.num_layers, WORLD, None, None)
        transfer = WeightTransfer(
            actor.chunks, shape, layout, WORLD, device, built.weights, int(config.sync.bucket_mib * 2**20)
        )
        most = 1e-4 if device.kind == "cpu" else BF16_NATS / 2
        for updates in range(2):
            timed(f"{size}: wake weights", built.memory.wake_weights, device)
            timed(f"{size}: weight sync", lambda: transfer.run(check=True), device)
            built.set_weight_version(updates)
            timed(f"{size}: wake KV cache", built.memory.wake_kv_cache, device)
            started = time.perf_counter()
            found = sorted(built.generate(requests), key=lambda one: one.key)
            seconds = time.perf_counter() - started
            new = sum(len(one.token_ids) for one in found)
            tell(f"{size}: rollout {updates}, {len(found)} requests", new / seconds, "tokens/s")
            timed(f"{size}: sleep", built.memory.sleep, device)
            mean = learn_from(actor, requests, found)
            after = "at the start" if updates == 0 else "after an update, written in place"
            what = f"{size}: engine against policy {after}, mean difference of log-probs"
            tell(what, mean, "nats", f"{most:g} at most", mean <= most)
        built.close()


def learn_from(actor: Any, requests: Sequence[Any], found: Sequence[Any]) -> float:
    """An optimizer step on what was sampled; the mean difference of the engine's and the policy's log-probs (nats)."""
    samples = [
        Sample(request.token_ids, tuple(one.token_ids), tuple(one.logprobs), 1.0 if n % 2 else -1.0)
        for n, (request, one) in enumerate(zip(requests, found, strict=True))
    ]
    batches = [pack(samples, range(first, first + 16), 1) for first in range(0, len(samples), 16)]
    result = actor.learner.learn(batches, None, None, True)
    assert result.discarded is None
    return result.sums["mismatch"] / result.sums["tokens"]


def timed(what: str, work: Callable[[], object], device: Device) -> None:
    """Seconds, and by how much the driver's count (resident memory on CPU) changed."""
    before = device_bytes(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    tell(what, time.perf_counter() - started, "s")
    tell(f"{what}: change of memory in use", (device_bytes(device) - before) / GIB, "GiB")


# ---------------------------------------------------------------- whole programs


def tests(given: argparse.Namespace) -> None:
    """tests/gpu, whose failures are in the log."""
    run_program([sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-p", "no:cacheprovider"])


def demo(given: argparse.Namespace) -> None:
    """`make demo`'s program on one rank."""
    command = [sys.executable, "tools/demo.py", "--ranks", "1", "--tensor-parallel", "1"]
    run_program([*command, "--output", str(given.folder / "demo")])


def run_program(command: Sequence[str]) -> None:
    """Its last line, and its status."""
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        last = ""
        for line in running.stdout:
            sys.stderr.write(line)
            last = line.strip() or last
    tell(" ".join(command[1:3]), last)
    if running.returncode:
        raise SystemExit(f"{' '.join(command[1:])} ended with {running.returncode}")


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    one.__name__: one
    for one in (machine, policy, transformer_engine, logprobs, step, packed, engine, tests, demo)
}
PARTS = {one.__name__: one for one in (measure_policy, train_case)}


def main() -> None:
    parser = argparse.ArgumentParser(description="One stage of tools/gpu_check.py.")
    parser.add_argument("stage", choices=[*STAGES, *PARTS])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, required=True, help="for models that are made")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    (STAGES | PARTS)[given.stage](given)


if __name__ == "__main__":
    main()
