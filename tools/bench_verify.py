"""Answers judged per second, against math-verify on the same cases.

math-verify is called one by one in one process.

    python tools/bench_verify.py [--quick] [--benchmarks DIR]

With a folder of public benchmark files (math_500.jsonl, olympiadbench.jsonl, ...) the mixture is
their reference answers, each as it is, slightly rewritten, and another problem's; without one it is
tests/answers/cases.jsonl. Prints figures (tools/figures.py), medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.answers.extraction import extract_boxed
from rlmath.workers.worker_pool import WorkerPool
from tools.figures import print_figure

CASES = Path(__file__).resolve().parents[1] / "tests" / "answers" / "cases.jsonl"
SEED = 1
SERIAL = "math-verify, serial"
HANG_LIMIT_SECONDS = 1.0


@dataclass(frozen=True)
class Case:
    completion: str
    solutions: tuple[str, ...]
    kind: str


def report(
    case: str,
    metric: str,
    value: float,
    unit: str,
    baseline: str | None = None,
    ratio: float | None = None,
) -> None:
    print_figure("verify", case, metric, value=value, unit=unit, baseline=baseline, ratio=ratio)


# ---------------------------------------------------------------- cases


def labelled_cases() -> list[Case]:
    """The labelled cases of the tests."""
    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    return [Case(row["completion"], tuple(row["solutions"]), row["class"]) for row in rows]


def benchmark_golds(folder: Path) -> list[str]:
    """Reference answers of the public files that are there; broken lines are passed over."""
    golds = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                gold = _gold(path.stem, json.loads(line))
            except ValueError:
                continue
            if gold:
                golds.append(gold)
    return golds


def _gold(name: str, row: dict) -> str | None:
    if name == "gsm8k":
        return str(row["answer"]).rpartition("####")[2].strip()
    if name == "minerva_math":
        return extract_boxed(row["solution"])
    if name == "olympiadbench":
        return ", ".join(row["final_answer"])
    return str(row["answer"]) if "answer" in row else None


def rewritten(answer: str) -> str:
    """The same answer as another model would write it."""
    swaps = (
        ("\\frac", "\\dfrac"),
        ("\\left", ""),
        ("\\right", ""),
        ("\\sqrt{", "\\sqrt {"),
        (" ", "\\,"),
    )
    for old, new in swaps:
        if old in answer:
            return answer.replace(old, new)
    return f"x = {answer}" if answer.lstrip("-").isdigit() else f"{{{answer}}}"


def mixture(golds: Sequence[str], size: int | None) -> list[Case]:
    """Right as written, right but rewritten, and the next problem's answer, at random."""
    rng = random.Random(SEED)
    cases = []
    for gold, next_gold in zip(golds, [*golds[1:], golds[0]], strict=True):
        for kind, answer in (("same", gold), ("rewritten", rewritten(gold)), ("other", next_gold)):
            text = "Let us see. " * rng.randint(1, 200) + f"So the answer is $\\boxed{{{answer}}}$."
            cases.append(Case(text, (f"\\boxed{{{gold}}}",), kind))
    rng.shuffle(cases)
    return cases[:size]


def hanging(count: int) -> list[Case]:
    """Answers on which sympy works for minutes, each another one."""
    return [
        Case(
            f"\\boxed{{\\int_0^1 \\frac{{\\sin(x^{{x^x}})+\\cos(\\ln(x+{number + 1}))}}"
            f"{{e^{{x^x}}+\\tan(x+{number + 1})}} dx}}",
            ("\\int_0^1 2x dx",),
            "hanging",
        )
        for number in range(count)
    ]


# ---------------------------------------------------------------- judges


def library_seconds(cases: Sequence[Case]) -> float:
    """math-verify, one after the other (seconds)."""
    from math_verify import parse, verify

    started = time.perf_counter()
    for case in cases:
        try:
            answer = parse(case.completion)
            any(verify(parse(solution), answer) for solution in case.solutions)
        except Exception:  # its own time limit, and what it raises on broken input
            pass
    return time.perf_counter() - started


def pool_seconds(cases: Sequence[Case], workers: int, limit: float = 5.0) -> float:
    """Our pool, from the first answer to the last verdict, its start not counted (seconds)."""
    with WorkerPool(workers, limit) as pool:
        # As many as there are workers, so that all of them have started.
        for future in [
            pool.submit(f"\\boxed{{\\sqrt{{{n + 2}}}}}", ("2.5x",), "math") for n in range(workers)
        ]:
            future.result()
        time.sleep(0.2)
        started = time.perf_counter()
        for future in [pool.submit(case.completion, case.solutions, "math") for case in cases]:
            future.result()
        return time.perf_counter() - started


def median(work: Callable[[], float], repeats: int) -> float:
    return statistics.median(work() for _ in range(repeats))


def processes_left() -> int:
    """Direct children of this process that are alive."""
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


# ---------------------------------------------------------------- benches


def bench_mixture(name: str, cases: Sequence[Case], repeats: int) -> None:
    library_time = median(lambda: library_seconds(cases), repeats)
    report(name, "math-verify", len(cases) / library_time, unit="answers/s")
    for workers in (1, 2):
        pool_time = median(lambda workers=workers: pool_seconds(cases, workers), repeats)
        title = f"{name}, {workers} worker{'s' * (workers > 1)}"
        report(
            title,
            "judged",
            len(cases) / pool_time,
            unit="answers/s",
            baseline=SERIAL,
            ratio=library_time / pool_time,
        )


def bench_classes(cases: Sequence[Case]) -> None:
    """Measure each kind of answer by itself."""
    for kind in sorted({case.kind for case in cases}):
        chosen = [case for case in cases if case.kind == kind]
        library_time = library_seconds(chosen)
        pool_time = pool_seconds(chosen, 1)
        report(
            f"class {kind}, 1 worker",
            "judged",
            len(chosen) / pool_time,
            unit="answers/s",
            baseline=SERIAL,
            ratio=library_time / pool_time,
        )


def bench_hanging(cases: Sequence[Case], size: int, repeats: int) -> None:
    """1% of the answers hang; each costs its limit, and nobody else waits."""
    hangs = hanging(size // 100)
    calm = [cases[number % len(cases)] for number in range(size - len(hangs))]
    all_cases = [*calm, *hangs]
    random.Random(SEED).shuffle(all_cases)
    workers = 2
    bound = (len(hangs) / workers + 1) * HANG_LIMIT_SECONDS
    quiet = median(lambda: pool_seconds(calm, workers, HANG_LIMIT_SECONDS), repeats)
    seconds = median(lambda: pool_seconds(all_cases, workers, HANG_LIMIT_SECONDS), repeats)
    name = f"{size} answers, {len(hangs)} hang, {workers} workers, limit {HANG_LIMIT_SECONDS:g} s"
    report(
        name,
        "all judged",
        seconds,
        unit="s",
        baseline="(hangs / workers + 1) x limit",
        ratio=bound / seconds,
    )
    report(name, "without the hangs", quiet, unit="s")
    report(name, "processes left", processes_left(), unit="processes")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Answers judged per second, against math-verify.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases, once: within a minute on two cores"
    )
    parser.add_argument("--benchmarks", help="folder of public benchmark files")
    arguments = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    labelled = labelled_cases()[:: 8 if arguments.quick else 1]
    cases = labelled
    name = "labelled cases"
    repeats = 1 if arguments.quick else 3
    if arguments.benchmarks:
        golds = benchmark_golds(Path(arguments.benchmarks))
        if not golds:
            print(f"bench_verify: no benchmark files in {arguments.benchmarks}", file=sys.stderr)
            return 2
        cases = mixture(golds, 1000 if arguments.quick else None)
        name = "benchmark answers"
    library_seconds(cases[:5])
    bench_mixture(name, cases, repeats)
    bench_classes(labelled)
    bench_hanging(cases, 1000 if arguments.quick else 10_000, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
