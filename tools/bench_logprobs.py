"""Memory and time of log-probs and entropy over Qwen2.5's vocabulary, against the plain way.

    python tools/bench_logprobs.py [--quick] [--device cpu|cuda]

The plain way: `logits.float() / temperature`, `log_softmax`, `gather`, `-(p * logp).sum()`, and
autograd. Ours: torch's operations over chunks of rows on CPU, on CUDA the kernels, which are
compared with these chunks, too. Forward and backward, with gradients through log-probs and entropy,
and through the log-probs alone; float32 and one thread on CPU, bfloat16 on CUDA. Every case runs in
a process of its own. Memory is what the first pass needs at its peak beyond the logits themselves
(resident memory on CPU, torch's allocator on CUDA); seconds are medians of later passes. Prints
figures (tools/figures.py).
"""

# Shape legend: T packed tokens, V vocabulary.

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.models.kernels import KERNEL_DEVICES
from rlmath.models.logprobs import MinTokensMask, next_logprobs, shift_to_tokens
from tools.figures import existing_device, print_figure

VOCABULARY = 151_936
TEMPERATURE = 0.8
REPEATS = 3
ENTROPY_COEF = 0.01
GRADIENTS = {"both": "log-probs and entropy", "logprobs": "log-probs alone"}
"""What gradients flow through, and how a case says so."""

Results = tuple[Tensor, Tensor]


def plain(logits_TV: Tensor, token_ids_T: Tensor, gradients: str) -> Results:
    """Log-prob of the next token and entropy, as a few lines of torch give them.

    Without a slice of the logits, which would cost another copy backward; the last row is about the
    first token."""
    all_TV = torch.log_softmax(logits_TV.float() / TEMPERATURE, -1)
    logprobs_T = all_TV.gather(1, token_ids_T.roll(-1)[:, None])[:, 0]
    with torch.set_grad_enabled(gradients == "both"):
        entropy_T = -(all_TV.exp() * all_TV).sum(-1)
    return logprobs_T, entropy_T


def ours(logits_TV: Tensor, token_ids_T: Tensor, gradients: str) -> Results:
    """The same by `next_logprobs`, shifted from the row before to the token."""
    index_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
    vocabulary = logits_TV.shape[1]

    def of_next(tokens_T: Tensor, next_index_T: Tensor) -> Results:
        return next_logprobs(
            logits_TV,
            tokens_T,
            next_index_T,
            temperature=TEMPERATURE,
            vocab_size=vocabulary,
            min_tokens_mask=MinTokensMask(),
            group=dist.group.WORLD,
        )

    return shift_to_tokens(of_next, token_ids_T, index_T)


WAYS = {"plain": plain, "chunks": ours, "kernels": ours}


def timed_pass(
    way: Callable[..., Results], logits_TV: Tensor, token_ids_T: Tensor, gradients: str
) -> tuple[float, float]:
    """Durations of one forward and one backward pass (seconds)."""
    # Through an operation of its own, as logits come from the output layer; not a leaf that keeps
    # its gradient.
    tensor_TV = logits_TV.requires_grad_().view_as(logits_TV)
    started = now(logits_TV)
    logprobs_T, entropy_T = way(tensor_TV, token_ids_T, gradients)
    forward = now(logits_TV)
    loss = -logprobs_T.mean()
    if gradients == "both":
        loss = loss - ENTROPY_COEF * entropy_T.mean()
    torch.autograd.grad(loss, tensor_TV)
    return forward - started, now(logits_TV) - forward


def now(tensor: Tensor) -> float:
    """The clock, once the tensor's device has done its work (seconds)."""
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def held_bytes(device: str, peak: bool) -> int:
    """Memory that this process holds, or the most it held since `forget_peak` (bytes)."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    key = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def forget_peak(device: str) -> None:
    """Let the peak be counted from what is held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")


def measure(way: str, gradients: str, device: str, tokens: int, repeats: int) -> dict[str, float]:
    """Peak extra bytes of a first pass, and median seconds of the others, in this process."""
    torch.set_num_threads(1)
    if way == "chunks":
        KERNEL_DEVICES.clear()
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1
    )
    torch.manual_seed(1)
    # Libraries load, kernels are compiled, and the process group starts, on a small problem.
    timed_pass(WAYS[way], *make_inputs(device, 4, VOCABULARY), gradients)
    logits_TV, token_ids_T = make_inputs(device, tokens, VOCABULARY)
    resting_bytes = held_bytes(device, peak=False)
    forget_peak(device)
    timed_pass(WAYS[way], logits_TV, token_ids_T, gradients)
    extra = held_bytes(device, peak=True) - resting_bytes
    passes = []
    for _ in range(repeats):
        fill(logits_TV)
        passes.append(timed_pass(WAYS[way], logits_TV, token_ids_T, gradients))
    dist.destroy_process_group()
    return {
        "extra_bytes": float(extra),
        "forward_seconds": statistics.median(forward for forward, _ in passes),
        "backward_seconds": statistics.median(backward for _, backward in passes),
        "seconds": statistics.median(sum(seconds) for seconds in passes),
    }


def make_inputs(device: str, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random logits, touched, and the tokens they should predict."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    logits_TV = fill(torch.empty(tokens, vocabulary, dtype=dtype, device=device))
    return logits_TV, torch.randint(0, vocabulary, (tokens,), device=device)


@torch.no_grad()
def fill(logits_TV: Tensor) -> Tensor:
    """Logits of an unsure model, in place: our backward pass has overwritten the last ones."""
    return logits_TV.normal_(std=3.0)


def in_own_process(
    way: str, gradients: str, device: str, tokens: int, repeats: int = REPEATS
) -> dict[str, Any]:
    """`measure` in a fresh process, so that no other case's memory is counted."""
    command = [
        sys.executable,
        __file__,
        "--measure",
        way,
        gradients,
        device,
        str(tokens),
        str(repeats),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def bench(device: str, gradients: str, tokens: int) -> None:
    """One case: peak extra memory, and seconds of forward, backward and both; less is better."""
    way, baselines = (
        ("kernels", ("chunks", "plain")) if device == "cuda" else ("chunks", ("plain",))
    )
    figures = {name: in_own_process(name, gradients, device, tokens) for name in (way, *baselines)}
    case = f"{device}, {tokens} tokens, gradient through {GRADIENTS[gradients]}"
    for baseline in baselines:
        for metric, unit in (
            ("extra_bytes", "bytes"),
            ("forward_seconds", "s"),
            ("backward_seconds", "s"),
            ("seconds", "s"),
        ):
            ours_figure = figures[way][metric]
            baseline_figure = figures[baseline][metric]
            baseline_text = f"{baseline}: {baseline_figure:.4g} {unit}"
            print_figure(
                "logprobs",
                case,
                metric,
                value=ours_figure,
                unit=unit,
                baseline=baseline_text,
                ratio=baseline_figure / max(ours_figure, 1e-9),
            )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, within a minute")
    parser.add_argument("--device", type=existing_device, choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        way, gradients, device, tokens, repeats = arguments.measure
        figures = measure(way, gradients, device, tokens=int(tokens), repeats=int(repeats))
        print(json.dumps(figures))
        return
    sizes = (8192, 20480) if arguments.device == "cuda" else (1024, 3072)
    if arguments.quick:
        sizes = (4096,) if arguments.device == "cuda" else (256,)
    for tokens in sizes:
        for gradients in GRADIENTS:
            bench(arguments.device, gradients, tokens)


if __name__ == "__main__":
    main()
