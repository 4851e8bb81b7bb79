"""Time of one rollout and one update on this machine's CPU, against plain transformers in the same process.

    python tools/bench_step.py [--quick]

One rank, one thread, a random Qwen2 of 0.6M parameters, samples of very different lengths. Prints one JSON object per
figure: {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; `ratio` above 1 means ours is better. Values
are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
    RolloutConfig,
)
from rlmath.data.packing import pack
from rlmath.data.seqlen_balancing import plan_minibatches
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.models.hf_config import read_model_shape
from rlmath.trainer.telemetry.console import setup_logging

REPOSITORY = Path(__file__).resolve().parents[1]
VOCABULARY = 100
MAX_TOKENS = 8192
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


def report(case: str, tokens: int, ours: float, theirs: float, baseline: str) -> None:
    """One JSON line: tokens per second of ours, and how many times the baseline's that is."""
    line = {
        "bench": "step",
        "case": case,
        "metric": "tokens_per_second",
        "value": round(tokens / ours, 1),
        "unit": "tokens/s",
        "baseline": f"{baseline}: {tokens / theirs:.1f} tokens/s",
        "ratio": round(theirs / ours, 3),
    }
    print(json.dumps(line), flush=True)


def make_samples(count: int) -> list[Sample]:
    """Prompts of 8 tokens and completions of 4 to 128, most of them short."""
    draw = random.Random(1)
    samples = []
    for _ in range(count):
        length = min(128, 4 + int(draw.expovariate(1 / 30)))
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


def bench_update(folder: Path, count: int, repeats: int) -> None:
    """One optimizer step on `count` samples."""
    from rlmath.models.build import build_actor
    from rlmath.models.megatron import start_megatron

    device, mesh = open_device("cpu"), Mesh(0, 1, 1, 1, 1)
    start_megatron(mesh, device, seed=1, timeout_seconds=600.0)
    config = Config(
        model=ModelConfig(path=str(folder)),
        policy=PolicyConfig(max_tokens_per_microbatch=MAX_TOKENS),
        optimizer=OptimizerConfig(lr=1e-5),
        algorithm=AlgorithmConfig(early_stop_ratio=None),
    )
    actor = build_actor(config, read_model_shape(folder), mesh, device, total_updates=1000, stop_token_ids=())
    samples = make_samples(count)

    def ours() -> None:
        (plan,) = plan_minibatches([s.length for s in samples], 1, 1, MAX_TOKENS, seed=1)
        actor.learner.learn([pack(samples, part, 1) for part in plan.microbatches_by_rank[0]], None, None)

    theirs = padded_update(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), samples)
    total = sum(sample.length for sample in samples)
    ours_seconds, theirs_seconds = median_seconds(ours, repeats), median_seconds(theirs, repeats)
    report(f"update, {count} samples", total, ours_seconds, theirs_seconds, "transformers, padded")


def bench_rollout(folder: Path, count: int, new_tokens: int, repeats: int) -> None:
    """`count` completions of exactly `new_tokens` tokens."""
    from rlmath.rollout.engine import open_standalone
    from rlmath.rollout.sampling import Request, sample

    settings = RolloutConfig(cpu_kv_cache_gib=0.5)
    llm = open_standalone(str(folder), settings, 16 + new_tokens, "cpu")
    requests = [
        Request((n, 0), (5, 6, 7, 8, 9, 10, 11, n % 90 + 3), n, new_tokens, new_tokens) for n in range(count)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([request.token_ids for request in requests])

    def theirs() -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=True,
        )

    ours_seconds = median_seconds(lambda: list(sample(llm, settings, requests)) and None, repeats)
    theirs_seconds = median_seconds(theirs, repeats)
    report(
        f"rollout, {count} x {new_tokens} tokens",
        count * new_tokens,
        ours_seconds,
        theirs_seconds,
        "transformers generate",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples and repeats, within a minute")
    quick = parser.parse_args().quick
    setup_logging(0)
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make = [sys.executable, "tools/make_tiny_model.py", "--output", str(folder)]
        subprocess.run(make, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        init_process_group(open_device("cpu"), 600.0)
        bench_update(folder, 128 if quick else 512, 2 if quick else 5)
        dist.destroy_process_group()
        bench_rollout(folder, 64 if quick else 256, 32 if quick else 128, 2 if quick else 5)


if __name__ == "__main__":
    main()
