"""Time of one update on this machine's CPU, against plain transformers in the same process.

    python tools/bench_step.py [--models 0.6M 9.5M 100M] [--quick]

One rank, one thread, random Qwen2 models, samples of very different lengths. Prints figures (tools/figures.py):
medians. "mfu" is the model's own arithmetic (`training_cost`) over the best float32 matrix multiplication of its sizes,
measured before; its baseline is that of transformers.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlmath.algorithms.types import Sample
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
)
from rlmath.data.packing import pack
from rlmath.data.seqlen_balancing import plan_minibatches, training_cost
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.peak_flops import peak_flops
from rlmath.models.hf_config import read_model_shape
from rlmath.telemetry.console import setup_logging
from tools.figures import print_figure

REPOSITORY = Path(__file__).resolve().parents[1]
VOCABULARY = 100
PADDED_ROWS = 32
"""Samples of one padded micro-batch of the baseline."""


def median_seconds(work: Callable[[], None], repeats: int) -> float:
    """Median duration of `work` after one call that is not counted (seconds)."""
    work()
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


@dataclass(frozen=True)
class Case:
    """A model, and the samples of one update."""

    make: tuple[str, ...]
    """Arguments of rlmath/cli/make_tiny_model.py."""
    samples: int
    mean_tokens: int
    most_tokens: int
    """Of a completion."""
    max_tokens_per_microbatch: int
    repeats: int


CASES = {
    "0.6M": Case((), 512, 34, 128, 8192, 5),
    "9.5M": Case(
        ("--hidden", "384", "--intermediate", "1024", "--layers", "6", "--heads", "6"), 64, 109, 400, 4096, 3
    ),
    "100M": Case(
        ("--hidden", "768", "--intermediate", "2304", "--layers", "14", "--heads", "12"),
        8,
        256,
        1024,
        2048,
        1,
    ),
}


def report(case: str, metric: str, unit: str, ours: float, theirs: float, baseline: str) -> None:
    """Ours, and how many times the baseline's that is."""
    told = f"{baseline}: {theirs:.4g} {unit}".rstrip()
    print_figure("step", case, metric, ours, unit, baseline=told, ratio=ours / theirs)


def make_samples(case: Case) -> list[Sample]:
    """Prompts of 8 tokens and completions whose lengths fall off exponentially."""
    draw = random.Random(1)
    samples = []
    for _ in range(case.samples):
        length = min(case.most_tokens, 4 + int(draw.expovariate(1 / (case.mean_tokens - 4))))
        completion = tuple(draw.randrange(3, VOCABULARY) for _ in range(length))
        prompt = tuple(draw.randrange(3, VOCABULARY) for _ in range(8))
        samples.append(Sample(prompt, completion, (-4.6,) * length, draw.uniform(-1, 1)))
    return samples


def padded_update(model: torch.nn.Module, samples: list[Sample]) -> Callable[[], None]:
    """The same GRPO update in transformers: micro-batches padded to their longest sample, in arrival order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = sum(len(sample.completion_ids) for sample in samples)

    def micro_loss(part: list[Sample]) -> torch.Tensor:
        longest = max(sample.length for sample in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        present, weights, advantages = torch.zeros(3, len(part), longest)
        for row, sample in enumerate(part):
            ids[row, : sample.length] = torch.tensor(sample.prompt_ids + sample.completion_ids)
            present[row, : sample.length] = 1
            weights[row, len(sample.prompt_ids) : sample.length] = 1
            advantages[row] = sample.advantage
        logits = model(input_ids=ids, attention_mask=present.long()).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = (logprobs + 4.6).exp()
        surrogate = torch.min(ratio * advantages[:, 1:], ratio.clamp(0.8, 1.2) * advantages[:, 1:])
        return -(surrogate * weights[:, 1:]).sum() / tokens

    def update() -> None:
        optimizer.zero_grad()
        for start in range(0, len(samples), PADDED_ROWS):
            micro_loss(samples[start : start + PADDED_ROWS]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def bench_update(folder: Path, name: str, case: Case, mesh: Mesh, device: Device) -> None:
    """One optimizer step on the case's samples."""
    from rlmath.models.build import build_actor

    shape, most = read_model_shape(folder), case.max_tokens_per_microbatch
    config = Config(
        model=ModelConfig(path=str(folder)),
        policy=PolicyConfig(max_tokens_per_microbatch=most),
        optimizer=OptimizerConfig(lr=1e-5),
        algorithm=AlgorithmConfig(early_stop_ratio=None),
    )
    peak = peak_flops(shape, mesh, device)
    actor = build_actor(config, shape, mesh, device, total_updates=1000, stop_token_ids=())
    samples = make_samples(case)
    lengths = [sample.length for sample in samples]

    def ours() -> None:
        (plan,) = plan_minibatches(lengths, 1, 1, most, seed=1)
        actor.learner.learn([pack(samples, part, 1) for part in plan.microbatches_by_rank[0]], None, None)

    theirs = padded_update(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), samples)
    ours_seconds, theirs_seconds = median_seconds(ours, case.repeats), median_seconds(theirs, case.repeats)
    title, baseline = f"update, {name} parameters, {case.samples} samples", "transformers, padded"
    tokens, work = sum(lengths), sum(map(training_cost(shape).of, lengths))
    report(title, "tokens_per_second", "tokens/s", tokens / ours_seconds, tokens / theirs_seconds, baseline)
    report(
        title, "flops_per_second", "GFLOP/s", work / ours_seconds / 1e9, work / theirs_seconds / 1e9, baseline
    )
    report(title, "mfu", "", work / ours_seconds / peak, work / theirs_seconds / peak, baseline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples and repeats, within a minute")
    parser.add_argument("--models", nargs="+", choices=CASES, default=tuple(CASES), help="default: all")
    given = parser.parse_args()
    quick, names = given.quick, ("0.6M",) if given.quick else given.models
    setup_logging(0)
    torch.set_num_threads(1)
    from rlmath.models.megatron import start_megatron

    os.environ.update(RANK="0", WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            make = [sys.executable, "-m", "rlmath.cli.make_tiny_model", "--output", f"{place}/{name}"]
            subprocess.run([*make, *CASES[name].make], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        device, mesh = open_device("cpu"), Mesh(0, 1, 1, 1, 1)
        init_process_group(device, 600.0, dist.HashStore())
        start_megatron(mesh, device, seed=1, timeout_seconds=600.0)
        for name in names:
            case = replace(CASES[name], samples=128, repeats=2) if quick else CASES[name]
            bench_update(Path(place) / name, name, case, mesh, device)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
