"""From `torchrun`'s start to the first sampled token of the demo, against imports and an engine alone.

    python tools/bench_start.py [--rounds 5] [--quick] [--cold]

Two ranks under torchrun each, in turns:

- ours: launch/train_grpo.py with the demo's settings, one token an answer. The first token is counted when the whole
  first rollout is done: the time of the program's line "Ready" plus the seconds of all phases until then;
- the baseline, tools/bare_start.py: the imports of Megatron-Core and vLLM, a process group, vLLM's engine on random
  weights, one token. It leaves the garbage collector and torch.compile as they are, as any such program would: it is
  no lower bound.

`--cold` also measures one start of each after the files of the environment were dropped from the system's file cache
(ours first: what the baseline reads is a part of that). Ends are measured too: from the last step's line to the end of
torchrun. Prints one JSON object per figure: {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; `ratio`
above 1 means ours is better. Medians; `--quick`: one round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.config.run_files import METRICS_FILE

REPOSITORY = Path(__file__).resolve().parents[1]
RANKS = 2
READY = "Ready, "
TRAINED = "step 1/1 "
PHASES = ("offload", "wake", "sync", "wake_kv_cache", "rollout")
"""Of a step, until its first rollout is done."""


def run_bare(model: Path) -> dict[str, float]:
    """Seconds from torchrun's start until every part of the baseline is done on the slower rank."""
    command = [*demo.torchrun(RANKS), "tools/bare_start.py", str(model)]
    started = time.time()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=demo.one_thread(), stdout=subprocess.PIPE, text=True, check=True
    )
    ranks = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert len(ranks) == RANKS, done.stdout
    return {part: max(rank[part] for rank in ranks) - started for part in ranks[0]}


def run_ours(place: Path, model: Path) -> dict[str, float]:
    """Seconds from torchrun's start until the program is ready and until its first token, and those of its end."""
    output = Path(tempfile.mkdtemp(dir=place, prefix="run-"))
    command = [*demo.torchrun(RANKS), "launch/train_grpo.py", "--config", "configs/demo.yaml"]
    command += [
        f"run.output_dir={output}",
        f"model.path={model}",
        "run.total_steps=1",
        "optimizer.warmup_steps=0",
    ]
    command += [f"data.train_path={place / 'data' / 'train.jsonl'}", "parallel.tensor=2"]
    command += ["rollout.max_new_tokens=1", "rollout.progress_bar=false"]
    seen, started = {}, time.perf_counter()
    program = subprocess.Popen(
        command, cwd=REPOSITORY, env=demo.one_thread(), stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert program.stderr is not None
    lines = []
    for text in program.stderr:
        lines.append(text)
        for name, mark in (("ready", READY), ("trained", TRAINED)):
            if mark in text:
                seen[name] = time.perf_counter() - started
    if program.wait():
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(lines)[-4000:]}")
    ended = time.perf_counter() - started
    row = json.loads((output / METRICS_FILE).read_text(encoding="utf-8").splitlines()[0])
    token = seen["ready"] + sum(row.get(f"seconds/{phase}", 0.0) for phase in PHASES)
    return {"ready": seen["ready"], "token": token, "end": ended - seen["trained"]}


def forget_files() -> int:
    """Drop the environment's files from the system's cache, as far as no program has them mapped; their number."""
    count = 0
    for path in Path(sysconfig.get_path("purelib")).rglob("*"):
        with suppress(OSError):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
                count += 1
    return count


def line(case: str, metric: str, ours: float, baseline: float | None = None, name: str = "") -> None:
    figure = {"bench": "start", "case": case, "metric": metric, "value": round(ours, 2), "unit": "s"}
    against = (
        {"baseline": None, "ratio": None}
        if baseline is None
        else {"baseline": f"{name}: {baseline:.2f} s", "ratio": round(baseline / ours, 3)}
    )
    print(json.dumps(figure | against), flush=True)


def report(case: str, ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> None:
    def median(runs: Sequence[Mapping[str, float]], part: str) -> float:
        return statistics.median(run[part] for run in runs)

    token = median(theirs, "token")
    line(case, "seconds_to_first_token", median(ours, "token"), token, "imports and an engine alone")
    line(case, "seconds_to_ready", median(ours, "ready"))
    for part in theirs[0]:
        line(case, f"baseline_seconds_to_{part}", median(theirs, part))
    line(case, "seconds_from_last_step_to_end", median(ours, "end"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="starts of each side (default 5)")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--cold", action="store_true", help="also with nothing in the file cache")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place, model = Path(name), Path(name) / "model"
        environment = demo.child_environment()
        for command in (
            ["-m", "rlmath.cli.make_arithmetic", "--output", str(place / "data")],
            ["-m", "rlmath.cli.make_tiny_model", "--output", str(model)],
        ):
            subprocess.run(
                [sys.executable, *command], cwd=REPOSITORY, env=environment, check=True, stdout=sys.stderr
            )
        run_bare(model)  # vLLM keeps what it finds out about a model
        ours, theirs = [], []
        for _ in range(1 if given.quick else given.rounds):
            ours.append(run_ours(place, model))
            theirs.append(run_bare(model))
        report("demo's settings, 2 ranks, files cached", ours, theirs)
        if given.cold:
            case = f"demo's settings, 2 ranks, {forget_files()} files not cached"
            ours_cold = run_ours(place, model)
            forget_files()
            report(case, [ours_cold], [run_bare(model)])


if __name__ == "__main__":
    main()
