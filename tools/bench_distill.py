"""What a small model learns from a larger one without any reward: on-policy distillation against training on the larger
model's samples.

    python tools/bench_distill.py [--seed 1] [--steps 25] [--output outputs/bench_distill] [--quick]

The teacher is the demo's model (rlmath demo), trained by SFT and GRPO; the student has half of its hidden size and
MLP, and learned from worked solutions with slips (rlmath.cli.make_arithmetic) alone. Three ways to go on from
there, all for the same number of optimizer steps, at learning rates (RATES) that fall to a tenth, on two ranks:

- full, advantage: `teacher.loss` of configs/algorithms/distill.yaml, on problems of train.jsonl. Rewards are measured,
  and not learned from;
- sft: supervised training on completions that the teacher samples for the same problems, as many tokens as "full"
  learned from.

Prints one JSON object per figure, {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}: held-out accuracy
(one sample each at temperature 1) of teacher, student, and student after every way. The baseline of the two ways is
"sft", of "sft" the student before; `ratio` above 1 is better. Also the completion tokens that each way learned from,
the seconds of its training, and the KL to the teacher in its first and last step. What is finished is kept in --output:
the same command goes on. `--quick`: a teacher of 6 steps, and 3 steps of each way; it shows that all of this runs, and
its accuracies say nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.config.run_files import EXPORT_FOLDER, SUMMARY_FILE
from rlmath.config.terminal import escape_terminal
from tools.benchmark_runs import BASE_SETTINGS, fingerprint, load_or_measure, print_figure

RANKS = 2
MINIBATCHES = 4
"""Optimizer steps of a step, of all ways."""
RATES = {"full": 1e-3, "advantage": 2e-4, "sft": 1e-3}
"""Learning rates: at 1e-3 the few tokens that "advantage" learns from lead it astray, and it takes that of
configs/demo.yaml."""
WAYS = ("full", "advantage")
STUDENT = ("--hidden", "64", "--intermediate", "128", "--heads", "2", "--kv-heads", "1")
"""Half of the teacher's width; heads are as wide, since vLLM on CPU has no narrower ones than 32."""


@dataclass(frozen=True)
class Plan:
    """How much is trained."""

    seed: int
    teacher_steps: int
    steps: int
    taught: tuple[str, ...] = ()
    """Further settings of the supervised training that both models begin with."""


def rate_settings(way: str) -> list[str]:
    return [f"optimizer.lr={RATES[way]}", f"optimizer.min_lr={RATES[way] / 10}", "optimizer.decay=linear"]


def measure(model: Path, data: Path, output: Path, seed: int) -> float:
    return demo.accuracy(f"Accuracy of {output.name}", model, data, output, seed)


def make_teacher(folder: Path, plan: Plan) -> dict[str, Any]:
    """The demo's model in `base`, and after GRPO in `run`."""
    python, environment = sys.executable, demo.child_environment()
    seed = ["--seed", str(plan.seed)]
    make_data = [python, "-m", "rlmath.cli.make_arithmetic", "--output", str(folder / "data"), *seed]
    demo.run("Arithmetic problems", make_data, environment)
    make_model = [python, "-m", "rlmath.cli.make_tiny_model", "--output", str(folder / "random"), *seed]
    demo.run("A tiny random model", make_model, environment)
    demo.teach(folder, plan.seed, plan.taught)
    more = [f"run.total_steps={plan.teacher_steps}"]
    train(folder / "run", folder / "base", folder / "data", plan, ["--config", "configs/demo.yaml"], more)
    return {
        "accuracy": measure(folder / "run" / EXPORT_FOLDER, folder / "data", folder / "teacher", plan.seed)
    }


def make_student(folder: Path, data: Path, plan: Plan) -> dict[str, Any]:
    """A model of half the teacher's width in `base`, from worked solutions."""
    make = [sys.executable, "-m", "rlmath.cli.make_tiny_model", "--output", str(folder / "random"), *STUDENT]
    demo.run("A smaller random model", [*make, "--seed", str(plan.seed)], demo.child_environment())
    (folder / "data").symlink_to(data)
    demo.teach(folder, plan.seed, [*plan.taught, "run.total_epochs=1"])
    return {"accuracy": measure(folder / "base", data, folder / "student", plan.seed)}


def train(
    output: Path, model: Path, data: Path, plan: Plan, files: Sequence[str], more: Sequence[str]
) -> dict[str, Any]:
    """A GRPO program's run; its summary."""
    command = [*demo.torchrun(RANKS), "-m", "rlmath.trainer", *files, f"run.output_dir={output}"]
    command += [f"run.seed={plan.seed}", f"model.path={model}", f"data.train_path={data / 'train.jsonl'}"]
    command += ["parallel.tensor=1", "save.ckpt_freq_secs=null", *more]
    demo.run(f"Training in {output.parent.name}", command, demo.one_thread())
    return json.loads((output / SUMMARY_FILE).read_text(encoding="utf-8"))


def distill(folder: Path, way: str, teacher: Path, student: Path, data: Path, plan: Plan) -> dict[str, Any]:
    """On-policy, without rewards."""
    files = ["--config", "configs/demo.yaml", "--config", "configs/algorithms/distill.yaml"]
    more = [
        f"teacher.path={teacher}",
        f"teacher.loss={way}",
        f"run.total_steps={plan.steps}",
        *rate_settings(way),
    ]
    more += ["optimizer.warmup_steps=2", f"algorithm.n_minibatches={MINIBATCHES}"]
    summary = train(folder / "run", student, data, plan, files, more)
    rows = demo.metrics_of(folder / "run")
    return {
        "accuracy": measure(folder / "run" / EXPORT_FOLDER, data, folder / way, plan.seed),
        "seconds": summary["seconds_training"],
        "tokens": sum(row["n_valid_tokens"] for row in rows),
        "teacher_kl": [row["train/teacher_kl"] for row in (rows[0], rows[-1])],
    }


def imitate(
    folder: Path, teacher: Path, student: Path, data: Path, tokens: float, plan: Plan
) -> dict[str, Any]:
    """Supervised training on the teacher's samples, `tokens` of them, in as many optimizer steps."""
    samples = sample_teacher(folder, teacher, data, tokens, plan)
    updates = plan.steps * MINIBATCHES
    command = [*demo.torchrun(RANKS), "-m", "rlmath.trainer", "sft", "--config", "configs/demo_sft.yaml"]
    command += [f"run.output_dir={folder / 'run'}", f"run.seed={plan.seed}", f"model.path={student}"]
    command += [f"data.train_path={samples}", f"data.prompts_per_step={count_rows(samples) // updates}"]
    command += [f"run.total_steps={updates}", "run.total_epochs=2", "sft.held_out_share=0"]
    command += ["sft.eval_every_steps=null", "optimizer.adam_beta2=0.999", "optimizer.warmup_steps=2"]
    demo.run(
        "Supervised training on the teacher's samples", [*command, *rate_settings("sft")], demo.one_thread()
    )
    summary = json.loads((folder / "run" / SUMMARY_FILE).read_text(encoding="utf-8"))
    return {
        "accuracy": measure(folder / "run" / EXPORT_FOLDER, data, folder / "sft", plan.seed),
        "seconds": summary["seconds_training"],
        "tokens": tokens,
    }


def sample_teacher(folder: Path, teacher: Path, data: Path, tokens: float, plan: Plan) -> Path:
    """Completions of training problems that the teacher sampled at temperature 1, a file to learn from."""
    mean_tokens = 16  # of a completion, about; what is too much is left out
    problems = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    each = max(1, round(1.5 * tokens / mean_tokens / len(problems)))
    command = [sys.executable, "-m", "rlmath.evals", "--model", str(teacher), "--seed", str(plan.seed)]
    command += ["--benchmarks", "train", "--data-dir", str(data), "--output", str(folder / "sampled")]
    command += ["--samples", str(each), "--no-greedy", "--temperature", "1", "--top-p", "1"]
    command += ["--max-prompt-tokens", str(demo.MAX_PROMPT_TOKENS)]
    command += ["--max-new-tokens", str(demo.MAX_NEW_TOKENS)]
    demo.run("Samples of the teacher", command, demo.child_environment())
    lines = [
        json.loads(line)
        for path in sorted((folder / "sampled" / "generations" / "train").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    random.Random(plan.seed).shuffle(lines)
    prompts, taken, output = {row["query_id"]: row["prompt"] for row in problems}, 0, folder / "samples.jsonl"
    with output.open("w", encoding="utf-8") as file:
        for line in lines:
            if taken >= tokens or line["finish_reason"] != "stop":
                continue
            taken += line["tokens"]
            row = {"prompt": prompts[line["problem_id"]], "completion": line["text"]}
            file.write(json.dumps(row) + "\n")
    if taken < tokens:
        raise SystemExit(f"bench_distill: the teacher's samples have {taken} tokens; needed: {tokens:.0f}")
    return output


def count_rows(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def report(figures: dict[str, dict[str, Any]]) -> None:
    """Print the lines."""

    def line(case: str, metric: str, value: float, unit: str, baseline: str | None) -> None:
        of_baseline = None if baseline is None else (baseline, figures[baseline].get(metric))
        print_figure("distill", case, metric, value, unit, of_baseline)

    compared = {"teacher": None, "student": None, "sft": "student"} | dict.fromkeys(WAYS, "sft")
    for case, baseline in compared.items():
        line(case, "accuracy", figures[case]["accuracy"], "share", baseline)
    for case in (*WAYS, "sft"):
        line(case, "tokens", figures[case]["tokens"], "tokens", None)
        line(case, "seconds", figures[case]["seconds"], "s", None)
    for way in WAYS:
        before, after = figures[way]["teacher_kl"]
        line(f"{way}, first step", "teacher_kl", before, "nats per token", None)
        line(f"{way}, last step", "teacher_kl", after, "nats per token", None)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or that of the program that failed."""
    escape_terminal()
    parser = argparse.ArgumentParser(description="Compare distillation with training on a teacher's samples.")
    parser.add_argument("--seed", type=int, default=1, help="of data, models and training (default 1)")
    parser.add_argument("--steps", type=int, default=25, help="steps of every way (default 25)")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/bench_distill"), help="(default outputs/bench_distill)"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    given = parser.parse_args(argv)
    plan = (
        Plan(given.seed, 6, 3, ("run.total_steps=100",)) if given.quick else Plan(given.seed, 50, given.steps)
    )
    place = given.output.resolve() / ("quick" if given.quick else f"seed-{plan.seed}-{plan.steps}-steps")
    teacher, data = place / "teacher" / "run" / EXPORT_FOLDER, place / "teacher" / "data"
    student = place / "student" / "base"
    figures: dict[str, dict[str, Any]] = {}

    def measured(
        case: str, make: Callable[[], dict[str, Any]], files: Sequence[str], *values: object
    ) -> None:
        made_of = fingerprint((*BASE_SETTINGS, *files), plan, STUDENT, MINIBATCHES, RATES.get(case), *values)
        figures[case] = load_or_measure(place / case, made_of, make)

    measured("teacher", lambda: make_teacher(place / "teacher", plan), ["configs/demo.yaml"])
    measured("student", lambda: make_student(place / "student", data, plan), [])
    for way in WAYS:
        measured(
            way,
            lambda way=way: distill(place / way, way, teacher, student, data, plan),
            ["configs/demo.yaml", "configs/algorithms/distill.yaml"],
        )
    tokens = figures["full"]["tokens"]
    measured(
        "sft",
        lambda: imitate(place / "sft", teacher, student, data, tokens, plan),
        ["configs/demo.yaml"],
        tokens,
    )
    report(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
