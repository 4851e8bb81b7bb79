"""Stages of tools/gpu_check.py that run the trainer.

One has its engine at a model's real size, the other has ranks that share one GPU.

NCCL refuses two ranks on one GPU only where their hosts are the same, too. So every rank has a
torchrun and a host of its own (NCCL_HOSTID), and sends by sockets: what that shows is right or
wrong, never fast. On a GPU all layouts start at once, on CPU, over gloo, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlmath.config.run_files import EXPORT_FOLDER, METRICS_FILE
from tools.gpu_setup import REPOSITORY, has_transformer_engine, random_model, sizes, tell

CONFIG = "tools/gpu_runs.yaml"
REWARD = """def low(completion, solutions, row):
    return sum(ord(one) < 80 for one in completion) / max(1, len(completion))
"""
"""A reward that a random model gets something from: the share of characters of ASCII's first
half."""
CHECKED = "sync.checksum_every=1"
ON_ITS_OWN = (
    "rollout.ranks=1",
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
)
MISMATCH_NATS = {"cpu": 1e-4, "cuda": 0.025}
"""Most that the log-probs of engine and policy with the same weights may differ on average
(nats)."""


@dataclass(frozen=True)
class Layout:
    """A run of some ranks."""

    ranks: int
    settings: tuple[str, ...]
    model: str = "tiny"
    needs_transformer_engine: bool = False
    follows: bool = True
    """Whether its second step is that of one rank, too, and not one on samples of older weights."""


LAYOUTS = {
    "one rank": Layout(1, (CHECKED,)),
    "TP2": Layout(2, ("parallel.tensor=2", CHECKED)),
    "PP2": Layout(2, ("parallel.pipeline=2", CHECKED)),
    "DP2": Layout(2, (CHECKED,)),
    "TP2, sequence parallelism": Layout(
        2, ("parallel.tensor=2", "parallel.sequence=true", CHECKED)
    ),
    "PP2, two chunks": Layout(2, ("parallel.pipeline=2", "parallel.virtual_pipeline=2", CHECKED)),
    "TP2 x CP2": Layout(
        4, ("parallel.tensor=2", "parallel.context=2", CHECKED), needs_transformer_engine=True
    ),
    "DP2, an engine of TP2": Layout(2, ("rollout.tensor_parallel=2", CHECKED)),
    "engine on its own rank, staleness 0": Layout(2, (*ON_ITS_OWN, "rollout.max_staleness=0")),
    "engine on its own rank, staleness 1": Layout(
        2, (*ON_ITS_OWN, "rollout.max_staleness=1"), follows=False
    ),
    "experts, one rank": Layout(1, (CHECKED,), "experts"),
    "experts, EP2": Layout(2, ("parallel.expert=2", CHECKED), "experts"),
}
"""Layouts by name; the first with a model is what the others with it are compared with."""
COMPARED = {
    "reward": ("task_reward", 1e-6, 0.1),
    "loss": ("actor_loss", 1e-5, 0.02),
    "gradient norm": ("train/grad_norm", 1e-3, 0.05),
    "entropy": ("train/entropy_loss", 1e-4, 0.01),
}
"""Metrics of the first step, and by how much they may differ in float32 on CPU and in bfloat16 on a
GPU, where an engine of two ranks samples some other tokens; of the norm as a share."""
LEAST_COSINE = {"cpu": 0.99, "cuda": 0.8}
"""Least cosine of what the two steps changed of the weights. Adam makes its first step by signs,
also of gradients that are rounding alone; half of the weights unchanged is 0.7."""


# ---------------------------------------------------------------- stages


def engine(arguments: argparse.Namespace) -> None:
    """Run a rank with the engine as users have it.

    There is a rollout, a sync of weights in place under CUDA graphs, and sleep and wake."""
    size = sizes(arguments)[-1]
    groups, new_tokens = (2, 32) if size == "tiny" else (32, 256)
    settings = (
        "run.total_steps=3",
        f"data.prompts_per_step={groups}",
        "rollout.group_size=8",
        f"rollout.max_new_tokens={new_tokens}",
        f"rollout.min_new_tokens={new_tokens}",
        "rollout.max_num_seqs=256",
        "rollout.max_num_batched_tokens=null",
        "rollout.cuda_graphs=true",
        "rollout.kv_cache_gib=null",
        "memory.leak_threshold_mib=512",
        "policy.max_tokens_per_microbatch=4096",
        "optimizer.lr=1e-4",
        # random tokens of a large vocabulary are no text, and all rewards the same
        "algorithm.entropy_coef=0.01",
    )
    work = workplace(arguments)
    failed, outcome = run(
        work / f"engine-{size}",
        Layout(1, (*settings, CHECKED)),
        *model_and_common(arguments, work, size),
    )
    if failed is not None:
        raise SystemExit(failed)
    max_mismatch = MISMATCH_NATS[arguments.device]
    for number, row in enumerate(outcome.rows):
        title = f"{size}, step {number + 1}"
        tell(
            f"{title}: rollout, {8 * groups} requests", row["tokens_per_second/rollout"], "tokens/s"
        )
        for phase in ("sleep", "wake", "sync", "wake_kv_cache"):
            tell(f"{title}: {phase}", row[f"seconds/{phase}"], "s")
            tell(f"{title}: held after {phase}", row[f"memory/after_{phase}_gib"], "GiB")
        mean = row["train/behaviour_logprob_diff"]
        figure_name = f"{title}: engine against policy, mean difference of log-probs"
        tell(
            figure_name,
            mean,
            "nats",
            expected=f"{max_mismatch:g} at most",
            holds=mean <= max_mismatch,
        )


def ranks(arguments: argparse.Namespace) -> None:
    """A line of metrics for each layout, or for those of --case ("one rank; TP2").

    The metrics should be those of one rank."""
    work = workplace(arguments)
    te = arguments.device == "cuda" and has_transformer_engine()
    names_wanted = arguments.case.split("; ") if arguments.case else LAYOUTS
    runs = {
        name: LAYOUTS[name]
        for name in names_wanted
        if te or not LAYOUTS[name].needs_transformer_engine
    }
    for name in names_wanted:
        if name not in runs:
            tell(name, "not run: needs Transformer Engine")
    places = {
        name: model_and_common(arguments, work, name)
        for name in {layout.model for layout in runs.values()}
    }
    with ThreadPoolExecutor(len(runs) if arguments.device == "cuda" else 1) as pool:
        started = {
            name: pool.submit(run, work / name.replace(" ", "-"), layout, *places[layout.model])
            for name, layout in runs.items()
        }
        # First those that others are compared with, then as they end: one that hangs keeps back its
        # own line alone.
        names = {future: name for name, future in started.items()}
        first = {layout.model: started[name] for name, layout in reversed(runs.items())}
        for future in (*first.values(), *as_completed(names.keys() - set(first.values()))):
            name = names[future]
            layout, (failed, outcome) = runs[name], future.result()
            base_failed, base = first[layout.model].result()
            if failed or base_failed:
                text = (
                    failed
                    or f"ran, with nothing to compare it with: {names[first[layout.model]]} failed"
                )
                tell(name, text, expected="exit status 0", holds=False)
                continue
            tell_found(
                name,
                layout,
                outcome,
                base=base,
                start=load_weights(places[layout.model][0]),
                device=arguments.device,
            )


# ---------------------------------------------------------------- a run


@dataclass(frozen=True)
class Found:
    """What a run left."""

    rows: Sequence[Mapping[str, Any]]
    """Metrics by step."""
    weights: Mapping[str, Tensor]
    """At its end."""


def workplace(arguments: argparse.Namespace) -> Path:
    """A folder with problems and the reward."""
    work = arguments.folder.resolve() / "runs"
    work.mkdir(parents=True, exist_ok=True)
    (work / "own.py").write_text(REWARD)
    if not (work / "sums").exists():
        command = [
            "rlmath.cli.make_arithmetic",
            "--output",
            str(work / "sums"),
            "--train",
            "64",
            "--heldout",
            "8",
        ]
        subprocess.run(
            [sys.executable, "-m", *command], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
        )
    return work


def model_and_common(
    arguments: argparse.Namespace, work: Path, size: str
) -> tuple[Path, list[str]]:
    """A random model, and the settings of all its runs on this device."""
    common = [
        f"run.device={arguments.device}",
        f"data.train_path={work / 'sums' / 'train.jsonl'}",
        f"reward.function={work / 'own.py'}:low",
    ]
    if arguments.device == "cuda" and not has_transformer_engine():
        common.append("policy.transformer_impl=local")
    return random_model(arguments.folder.resolve(), size), common


def run(
    place: Path, layout: Layout, model: Path, common: Sequence[str]
) -> tuple[str | None, Found]:
    """Start the ranks and wait until they end; their output is in `place`.

    Returns why the run failed (None where it did not) and what it left."""
    output = place / "run"
    place.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [f"model.path={model}", f"run.output_dir={output}", *common, *layout.settings]
    started = []
    for rank in range(layout.ranks):
        launcher = [f"--nnodes={layout.ranks}", f"--node-rank={rank}", "--nproc-per-node=1"]
        launcher += ["--master-addr=127.0.0.1", f"--master-port={port}", "launch/train_grpo.py"]
        with open(place / f"{rank}.log", "wb") as log:
            started.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        *launcher,
                        "--config",
                        CONFIG,
                        *settings,
                    ],
                    cwd=REPOSITORY,
                    env=os.environ | host_of(place.name, rank),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    if status := wait_for_all(started):
        return f"exit status {status}: {reason(place)}", Found((), {})
    rows = [json.loads(line) for line in (output / METRICS_FILE).read_text("utf-8").splitlines()]
    return None, Found(rows, load_weights(output / EXPORT_FOLDER))


def wait_for_all(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit status of the first that failed, 0 of none.

    The others are ended then: they would wait for it."""
    status = 0
    with ThreadPoolExecutor(len(ranks)) as pool:
        for ended in as_completed([pool.submit(rank.wait) for rank in ranks]):
            if not status and (status := ended.result()):
                for rank in ranks:
                    rank.terminate()
    return status


def host_of(name: str, rank: int) -> dict[str, str]:
    """The environment in which NCCL takes a rank for the only one of its host."""
    return {
        "NCCL_HOSTID": f"{name}-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_NCHANNELS": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }


def reason(place: Path) -> str:
    """The first line of a rank's that tells of an error."""
    texts = [log.read_text("utf-8", errors="replace") for log in sorted(place.glob("*.log"))]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    error_lines = (
        line
        for line in lines
        if "Error: " in line or "NCCL WARN" in line or line.startswith("  - ")
    )
    return next(error_lines, lines[-1] if lines else "without a message").strip()[:300]


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of a Hugging Face folder, in float64."""
    return {
        name: tensor.double()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


# ---------------------------------------------------------------- beside one rank


def tell_found(
    name: str, layout: Layout, outcome: Found, base: Found, start: Mapping[str, Tensor], device: str
) -> None:
    """Print the line of a layout's run, compared with that of one rank, `base`.

    Both began with the weights `start`."""
    texts = []
    wrong = []
    for title, (metric, on_cpu, on_gpu) in COMPARED.items():
        number = outcome.rows[0][metric]
        base_number = base.rows[0][metric]
        max_difference = (on_cpu if device == "cpu" else on_gpu) * (
            base_number if title == "gradient norm" else 1.0
        )
        texts.append(f"{title} {number:.5g}")
        wrong += (
            [f"{title} {base_number:.5g}"]
            if not abs(number - base_number) <= max_difference
            else []
        )
    checked_rows = outcome.rows if layout.follows else outcome.rows[:1]
    mismatch = max(row["train/behaviour_logprob_diff"] for row in checked_rows)
    texts.append(f"mismatch {mismatch:.2g}")
    wrong += (
        [f"mismatch at most {MISMATCH_NATS[device]:g}"]
        if not mismatch <= MISMATCH_NATS[device]
        else []
    )
    cosine = cosine_of_changes(start, base.weights, outcome.weights)
    texts.append(f"cosine {cosine:.5f}")
    least = LEAST_COSINE[device] if layout.follows else 0.0
    wrong += [f"cosine at least {least:g}"] if not cosine >= least else []
    tell(name, ", ".join(texts), expected=", ".join(wrong) or "as one rank", holds=not wrong)


def cosine_of_changes(
    start: Mapping[str, Tensor], first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> float:
    """Cosine of the changes that two runs made to their first weights; 1 where they are alike."""
    first_change = torch.cat([(first[name] - initial).flatten() for name, initial in start.items()])
    second_change = torch.cat(
        [(second[name] - initial).flatten() for name, initial in start.items()]
    )
    return float(torch.nn.functional.cosine_similarity(first_change, second_change, dim=0))
