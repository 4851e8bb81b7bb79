"""Steps of this trainer and of TRL's GRPO on this machine, in turns.

Both have the same model, lengths and batch.

    python tools/bench_peer.py [--cases P1 P3] [--rounds 3] [--quick]
    python tools/bench_peer.py --device cuda --model SmolLM2-135M-Instruct --data gsm8k.jsonl
        [--seconds 350]

On CPU two processes each; TRL runs in an environment of its own, which this makes from
requirements/peer.txt:

    python -m rlmath.cli.install .venv-peer requirements/peer.txt

Without it the bench says so and ends with status 0. On CUDA one process each, TRL with vLLM in it
(colocated); it runs by this program's own Python, which needs trl and datasets, too. Every side
runs each of its listed settings (at most six) once, and the best of them `--rounds` times in all,
in turns with the other side's.

- P1: 0.6M parameters, 32 prompts x 8, exactly 128 new tokens, one optimizer step
- P3: the demo's base model, 64 x 8, at most 32 new tokens, 4 optimizer steps
- G1, with --model and --data (question and answer, as GSM8K's): 64 x 16, exactly 256 new tokens,
  one optimizer step; both compute the log-probs of what they sampled anew, and reward it by
  tools/peer_reward.py. On CPU 2 x 4 of 16 tokens, which shows that it runs

Prints figures (tools/figures.py). Seconds of a step are medians over all measured steps of a side's
best setting; realised lengths are reported. A run that is not done within `--limit` seconds ends
the bench; with `--seconds` no round begins that may not end in time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.config.run_files import METRICS_FILE
from rlmath.config.terminal import escape_terminal
from tools.figures import existing_device, print_figure
from tools.gpu_setup import has_transformer_engine, random_model

REPOSITORY = Path(__file__).resolve().parents[1]
RANKS = 2
SEED = 101


@dataclass(frozen=True)
class Case:
    """What both sides do."""

    title: str
    prompts: int
    new_tokens: tuple[int, int]
    """Least and most tokens of a completion."""
    optimizer_steps: int
    warm_up: int
    steps: int
    """Measured steps of a run."""
    our_layouts: Mapping[str, Sequence[str]]
    """Settings by name: overrides of the config."""
    their_batches: Sequence[int]
    """Sequences of a rank's micro-batch."""
    group: int = 8
    ranks: int = RANKS
    device: str = "cpu"
    settings: Sequence[str] = ("data.max_prompt_tokens=32", "algorithm.recompute_logprobs=false")
    """Settings of ours, whatever the layout."""


def layouts(*tokens: int) -> dict[str, tuple[str, ...]]:
    """Both layouts of two ranks, with each of these micro-batches (tokens)."""
    return {
        f"TP{tensor} x DP{RANKS // tensor}, {microbatch_tokens} tokens": (
            f"parallel.tensor={tensor}",
            f"policy.max_tokens_per_microbatch={microbatch_tokens}",
        )
        for tensor in (1, RANKS)
        for microbatch_tokens in tokens
    }


CASES = {
    "P1": Case(
        "0.6M, 32 x 8 x 128 tokens",
        32,
        (128, 128),
        optimizer_steps=1,
        warm_up=2,
        steps=4,
        our_layouts=layouts(2048, 8192),
        their_batches=(128, 32),
    ),
    "P3": Case(
        "the demo's base, 64 x 8, 4 optimizer steps",
        64,
        (0, 32),
        optimizer_steps=4,
        warm_up=2,
        steps=8,
        our_layouts=layouts(8192),
        their_batches=(64, 32),
    ),
    "G1": Case(
        "a chat model, 64 x 16 x 256 tokens",
        prompts=64,
        new_tokens=(256, 256),
        optimizer_steps=1,
        warm_up=2,
        steps=4,
        our_layouts={"16,384 tokens": ("policy.max_tokens_per_microbatch=16384",)},
        their_batches=(64,),
        group=16,
        ranks=1,
        settings=(
            "data.max_prompt_tokens=512",
            "data.template=chat",
            "rollout.max_num_seqs=1024",
            "rollout.memory_share=0.4",
            "optimizer.warmup_steps=0",
            f"reward.function={REPOSITORY / 'tools' / 'peer_reward.py'}:early_letters",
        ),
    ),
}
ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Measured:
    """Steps of one run, after the warm-up."""

    step_seconds: list[float]
    generate_seconds: list[float]
    completion_tokens: list[float]
    mfu: float | None = None
    """MFU of the update, as the trainer logs it (median); None for TRL."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)


def case_of(name: str, device: str) -> Case:
    """G1 has less work on CPU, and on a GPU local layers where Transformer Engine is not."""
    case = replace(CASES[name], title=f"{name}: {CASES[name].title}", device=device)
    if device == "cuda" and not has_transformer_engine():
        local = (*case.settings, "policy.transformer_impl=local")
        case = replace(case, title=f"{case.title}, local layers", settings=local)
    if name == "G1" and device == "cpu":
        less = {
            "prompts": 2,
            "group": 4,
            "new_tokens": (16, 16),
            "warm_up": 0,
            "steps": 2,
            "their_batches": (4,),
        }
        case = replace(case, title="G1: a chat model, 2 x 4 x 16 tokens", **less)
    return case


def prepare(
    place: Path, name: str, model: Path | None = None, data: Path | None = None
) -> tuple[Path, Path]:
    """The case's model folder and prompt file.

    G1's are given, and its questions are asked alike on both sides."""
    if name == "G1":
        assert model is not None and data is not None
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        asked = [
            {
                "prompt": row["question"] + ASK,
                "solutions": [f"\\boxed{{{row['answer'].rpartition('####')[2].strip()}}}"],
                "task": "math",
                "query_id": str(number),
            }
            for number, row in enumerate(rows[:1000])
        ]
        (place / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
        return model.absolute(), place / "asked.jsonl"
    if name == "P1":
        make = [sys.executable, "-m", "rlmath.cli.make_arithmetic", "--output", str(place / "data")]
        make += ["--seed", str(SEED)]
        subprocess.run(make, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        return random_model(place, "tiny"), place / "data" / "train.jsonl"
    with contextlib.redirect_stdout(sys.stderr):  # the figures have stdout for themselves
        demo.make_base(place / "demo", SEED)
    return place / "demo" / "base", place / "demo" / "data" / "train.jsonl"


def run_limited(command: list[str], environment: Mapping[str, str], log: Path, limit: float) -> str:
    """Run a program and return what it prints to stdout.

    SystemExit, with the end of its log, where it failed or took longer."""
    with log.open("a", encoding="utf-8") as stderr, tempfile.TemporaryFile("w+") as stdout:
        program = subprocess.Popen(
            command, cwd=REPOSITORY, env=dict(environment), stdout=stdout, stderr=stderr
        )
        try:
            status: int | str = program.wait(limit)
        except subprocess.TimeoutExpired:
            program.terminate()  # torchrun ends its ranks, after 30 s by force
            program.wait()
            status = f"nothing after {limit:.0f} s"
        if status:
            sys.stderr.write(log.read_text(encoding="utf-8", errors="replace")[-4000:])
            raise SystemExit(f"bench_peer: {' '.join(command[:8])} ... ended with {status}")
        stdout.seek(0)
        return stdout.read()


def our_settings(
    output: Path, model: Path, data: Path, case: Case, overrides: Sequence[str]
) -> list[str]:
    """The settings of one run of launch/train_grpo.py."""
    min_new_tokens, max_new_tokens = case.new_tokens
    return [
        f"run.output_dir={output}",
        f"run.device={case.device}",
        f"run.total_steps={case.warm_up + case.steps}",
        "run.total_epochs=1000",
        f"model.path={model}",
        f"data.train_path={data}",
        f"data.prompts_per_step={case.prompts}",
        f"rollout.group_size={case.group}",
        f"rollout.min_new_tokens={min_new_tokens}",
        f"rollout.max_new_tokens={max_new_tokens}",
        "rollout.cpu_kv_cache_gib=1",
        f"algorithm.n_minibatches={case.optimizer_steps}",
        "optimizer.lr=1e-5",
        "save.ckpt_freq_secs=null",
        *case.settings,
        *overrides,
    ]


def run_ours(
    place: Path, model: Path, data: Path, case: Case, overrides: Sequence[str], limit: float
) -> Measured:
    """One run of ours."""
    output = Path(tempfile.mkdtemp(dir=place, prefix="ours-"))
    settings = our_settings(output, model, data, case=case, overrides=overrides)
    command = [*demo.torchrun(case.ranks), "launch/train_grpo.py", *settings]
    run_limited(command, demo.one_thread(), place / "log.txt", limit)
    lines = (output / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[case.warm_up :]]
    return Measured(
        [row["seconds/step"] for row in rows],
        [row["seconds/rollout"] for row in rows],
        [row["n_valid_tokens"] for row in rows],
        mfu=statistics.median(row["train/mfu"] for row in rows),
    )


def their_arguments(model: Path, data: Path, case: Case, micro_batch: int) -> list[str]:
    """The options of one run of tools/peer_trl.py."""
    min_new_tokens, max_new_tokens = case.new_tokens
    options = {
        "model": model,
        "data": data,
        "device": case.device,
        "prompts": case.prompts,
        "group": case.group,
        "min-new-tokens": min_new_tokens,
        "max-new-tokens": max_new_tokens,
        "optimizer-steps": case.optimizer_steps,
        "steps": case.steps,
        "warm-up": case.warm_up,
        "micro-batch": micro_batch,
    }
    chat = ["--chat"] if "data.template=chat" in case.settings else []
    return [*(text for name, value in options.items() for text in (f"--{name}", str(value))), *chat]


def run_theirs(
    place: Path, python: Path, model: Path, data: Path, case: Case, micro_batch: int, limit: float
) -> Measured:
    """One run of TRL in its own environment."""
    command = [
        str(python),
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={case.ranks}",
    ]
    command += ["tools/peer_trl.py", *their_arguments(model, data, case, micro_batch)]
    environment = demo.one_thread()
    if python != Path(sys.executable):
        environment.pop("PYTHONPATH", None)  # its packages are others
    printed = run_limited(command, environment, place / "log.txt", limit)
    figures: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return Measured(
        figures["step_seconds"], figures["generate_seconds"], figures["completion_tokens"]
    )


def bench(
    case: Case, files: tuple[Path, Path], place: Path, python: Path, arguments: argparse.Namespace
) -> None:
    """Both sides of a case, in turns, as long as a further round fits."""
    model, data = files
    began = time.monotonic()
    until = began + arguments.seconds

    def ours_by(setting: str) -> Measured:
        return run_ours(
            place,
            model,
            data,
            case=case,
            overrides=case.our_layouts[setting],
            limit=min(arguments.limit, until - time.monotonic()),
        )

    def theirs_by(size: int) -> Measured:
        return run_theirs(
            place,
            python,
            model,
            data=data,
            case=case,
            micro_batch=size,
            limit=min(arguments.limit, until - time.monotonic()),
        )

    our_runs = {key: [ours_by(key)] for key in case.our_layouts}
    their_runs = {size: [theirs_by(size)] for size in case.their_batches}
    best = min(our_runs, key=lambda key: our_runs[key][0].seconds)
    best_of_theirs = min(their_runs, key=lambda size: their_runs[size][0].seconds)
    longest = time.monotonic() - began
    for _ in range(arguments.rounds - 1):
        if time.monotonic() + longest > until:
            break
        our_runs[best].append(ours_by(best))
        their_runs[best_of_theirs].append(theirs_by(best_of_theirs))
    title = f"{case.title}; ours {best}; TRL micro-batch {best_of_theirs}"
    report(title, our_runs[best], their_runs[best_of_theirs], completions=case.prompts * case.group)


def line(case: str, metric: str, unit: str, ours: float, theirs: float, ratio: float) -> None:
    print_figure(
        "peer",
        case,
        metric,
        value=ours,
        unit=unit,
        baseline=f"TRL: {theirs:.3f} {unit}",
        ratio=ratio,
    )


def report(
    title: str, ours: Sequence[Measured], theirs: Sequence[Measured], completions: int
) -> None:
    """The figures of a case with so many completions a step."""

    def median(runs: Sequence[Measured], name: str) -> float:
        return statistics.median(value for run in runs for value in getattr(run, name))

    our_seconds = median(ours, "step_seconds")
    their_seconds = median(theirs, "step_seconds")
    line(
        title,
        "step_seconds",
        "s",
        ours=our_seconds,
        theirs=their_seconds,
        ratio=their_seconds / our_seconds,
    )
    reached = [run.mfu for run in ours if run.mfu is not None]
    print_figure(
        "peer", title, "mfu of the update", value=statistics.median(reached), unit="of the ceiling"
    )
    our_generate_seconds = median(ours, "generate_seconds")
    their_generate_seconds = median(theirs, "generate_seconds")
    line(
        title,
        "generate_seconds",
        "s",
        ours=our_generate_seconds,
        theirs=their_generate_seconds,
        ratio=their_generate_seconds / our_generate_seconds,
    )
    our_tokens = median(ours, "completion_tokens")
    their_tokens = median(theirs, "completion_tokens")
    line(
        title,
        "completion_tokens_of_a_step",
        "tokens",
        ours=our_tokens,
        theirs=their_tokens,
        ratio=our_tokens / their_tokens,
    )
    line(
        title,
        "mean_length",
        "tokens",
        ours=our_tokens / completions,
        theirs=their_tokens / completions,
        ratio=our_tokens / their_tokens,
    )
    rates = [
        statistics.median(
            n / s
            for run in runs
            for n, s in zip(run.completion_tokens, run.step_seconds, strict=True)
        )
        for runs in (ours, theirs)
    ]
    line(
        title,
        "completion_tokens_per_second",
        "tokens/s",
        ours=rates[0],
        theirs=rates[1],
        ratio=rates[0] / rates[1],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status is that of a program that failed, else 0.

    It is 0 also where TRL's environment is not there."""
    escape_terminal()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, help="default: P1 and P3; on CUDA G1, the only one"
    )
    parser.add_argument("--device", type=existing_device, choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="of G1: a folder")
    parser.add_argument("--data", type=Path, help="of G1: JSONL of question and answer")
    parser.add_argument(
        "--peer", type=Path, help="TRL's environment, or its Python (.venv-peer; on CUDA this one)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each side's best setting (default 3)"
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds of one run at most (default 900)"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of a case at most (default: any)"
    )
    parser.add_argument("--quick", action="store_true", help="P1 only, one round")
    arguments = parser.parse_args(argv)
    cuda = arguments.device == "cuda"
    names = arguments.cases or (["G1"] if cuda else ["P1"] if arguments.quick else ["P1", "P3"])
    if cuda and names != ["G1"]:
        parser.error("--device cuda: G1 is the only case for a GPU")
    if "G1" in names and not (arguments.model and arguments.data):
        parser.error(
            "G1 needs --model (a chat model's folder) and --data (JSONL of question and answer)"
        )
    python = arguments.peer or (Path(sys.executable) if cuda else REPOSITORY / ".venv-peer")
    python = (
        python.absolute() / "bin" / "python" if python.is_dir() or not python.exists() else python
    )
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
    if not python.exists() or subprocess.run([python, "-c", look], check=False).returncode:
        print(
            f"bench_peer: skipped: {python} has no TRL. Make it: python -m rlmath.cli.install "
            ".venv-peer "
            "requirements/peer.txt, or on CUDA: pip install trl==1.16.0",
            file=sys.stderr,
        )
        return 0
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            case = case_of(name, arguments.device)
            files = prepare(Path(place), name, arguments.model, arguments.data)
            bench(case, files, Path(place), python=python, arguments=arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
