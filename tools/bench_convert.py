"""How long the converters take and how much memory, against transformers and against a plain copy.

    python tools/bench_convert.py [--quick] [--folder DIR]

Prints one JSON object per figure: {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; `ratio` above 1
means ours is better. Every conversion is a program of its own: seconds are from its start to its end, cpu_seconds those
that processors worked for it, peak_memory is the largest that its process held, Python and torch included. The model
has Qwen2's shape, random weights in bfloat16, files of 2 GB at most, and is made tensor by tensor. Baselines, on the
same model in the same run, taking turns (medians of three): transformers' from_pretrained with save_pretrained, and
`cp`. Files may be in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from rlmath.checkpoint.hf.weight_map import hf_shapes, parameter_count, placed_tensors
from rlmath.checkpoint.hf.weights import HFReader, SafetensorsWriter
from rlmath.config.model_shape import ModelShape
from rlmath.models.hf_config import read_model_shape

REPOSITORY = Path(__file__).resolve().parents[1]
SHARD_BYTES = 2 * 10**9
LARGE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
SMALL = LARGE | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 32000}
TRANSFORMERS = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.save_pretrained(sys.argv[2], max_shard_size="2GB")
"""

WATCHER = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.run(sys.argv[1:]).returncode
seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = used.ru_utime + used.ru_stime
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_memory": used.ru_maxrss * 1024 / 1e9}))
sys.exit(status)
"""
"""A small process between, that has one child: the kernel counts what a parent holds as its child's memory."""


@dataclass(frozen=True)
class Cost:
    """Of one program."""

    seconds: float
    cpu_seconds: float
    peak_memory: float
    """GB."""


def make_model(folder: Path, sizes: dict[str, int]) -> ModelShape:
    """A random model on disk; only one tensor of it is in memory at a time."""
    folder.mkdir(parents=True)
    config = sizes | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = read_model_shape(folder)
    writer = SafetensorsWriter(folder, SHARD_BYTES)
    for name, weight in random_weights(shape):
        writer.add(name, weight, torch.bfloat16)
    writer.close()
    return shape


def random_weights(shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name."""
    generator = torch.Generator().manual_seed(1)
    for placed in placed_tensors(shape):
        for name, size in zip(placed.hf_names, hf_shapes(placed.rule, shape), strict=True):
            yield name, torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def cost_of(command: Sequence[str]) -> Cost:
    """Run a program to its end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    watched = [sys.executable, "-c", WATCHER, *command]
    done = subprocess.run(
        watched, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def compare(model: Path, place: Path, repeats: int) -> dict[str, Cost]:
    """Cost of every way, by name: medians of runs that take turns, on a machine that others may use."""
    runs: dict[str, list[Cost]] = {}
    for number in range(repeats):
        for name, command, output in ways(model, place):
            runs.setdefault(name, []).append(cost_of(command))
            if name == "to_hf" and number == 0:
                assert_same(model, output)
            if name != "to_megatron":  # "to_hf" reads it
                shutil.rmtree(output)
        shutil.rmtree(place / "megatron")
    return {
        name: Cost(
            *(statistics.median(getattr(cost, field.name) for cost in costs) for field in fields(Cost))
        )
        for name, costs in runs.items()
    }


def ways(model: Path, place: Path) -> list[tuple[str, list[str], Path]]:
    """Name, command and output of each."""
    copy, saved, state, back = (place / name for name in ("copy", "saved", "megatron", "hf"))
    python = sys.executable
    to_megatron = [
        python,
        "-m",
        "rlmath.cli.convert",
        "to-megatron",
        "--hf",
        str(model),
        "--output",
        str(state),
    ]
    to_hf = [python, "-m", "rlmath.cli.convert", "to-hf", "--checkpoint", str(state), "--output", str(back)]
    return [
        ("cp", ["cp", "-r", str(model), str(copy)], copy),
        ("transformers", [python, "-c", TRANSFORMERS, str(model), str(saved)], saved),
        ("to_megatron", to_megatron, state),
        ("to_hf", [*to_hf, "--shard-gib", str(SHARD_BYTES / 2**30)], back),
    ]


def assert_same(model: Path, back: Path) -> None:
    """There and back, every bit of the weights is the same."""
    before, after = HFReader(model), HFReader(back)
    differ = [name for name in before.names if not torch.equal(before.tensor(name), after.tensor(name))]
    if differ or before.names != after.names:
        raise RuntimeError(f"the way there and back changed {differ[:3]}")


def report(case: str, found: dict[str, Cost], largest_gb: float, model_gb: float) -> None:
    """One line per figure and baseline."""

    def line(what: str, metric: str, value: float, unit: str, baseline: str | None, other: float) -> None:
        values = {"bench": "convert", "case": f"{case}, {what}", "metric": metric, "value": round(value, 3)}
        ratio = None if baseline is None else round(other / value, 3)
        named = None if baseline is None else f"{baseline}: {other:.3f}"
        print(json.dumps(values | {"unit": unit, "baseline": named, "ratio": ratio}), flush=True)

    for what in ("to_megatron", "to_hf"):
        mine = found[what]
        for metric, unit in (("seconds", "s"), ("cpu_seconds", "s"), ("peak_memory", "GB")):
            for name in ("transformers", "cp"):
                if (metric, name) != ("peak_memory", "cp"):
                    line(what, metric, getattr(mine, metric), unit, name, getattr(found[name], metric))
        line(what, "peak_memory", mine.peak_memory, "GB", "the model", model_gb)
    line("all", "largest_tensor", largest_gb, "GB", None, 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model in a folder that is removed, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, within a minute")
    parser.add_argument("--folder", type=Path, help="where to put the files (9 GB); default: the system's")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        shape = make_model(Path(place) / "model", SMALL if given.quick else LARGE)
        parameters = parameter_count(shape)
        found = compare(Path(place) / "model", Path(place), repeats=1 if given.quick else 3)
    largest = shape.vocab_size * shape.hidden_size * 2 / 1e9
    report(f"Qwen2, {parameters / 1e9:.2f} B parameters, bfloat16", found, largest, parameters * 2 / 1e9)
    return 0


if __name__ == "__main__":
    sys.exit(main())
