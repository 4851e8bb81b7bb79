"""Verify the answers of a file, with the verifier that the trainer uses.

    rlmath verify --input cases.jsonl --output verdicts.jsonl --workers 2

Each input line is {"id", "completion", "solutions": [...]} with an optional "task", and an optional
"question", whose words and units may stand beside a value; each output line, in the order of the
input, {"id", "correct", "extracted", "verdict", "seconds"}. Malformed lines are reported by number
on stderr and skipped; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlmath.answers.verifier import MAX_SOLUTIONS, TASKS, Rules, Verdict
from rlmath.config.terminal import escape_terminal
from rlmath.workers.worker_pool import WorkerPool

WAITING = 4096
"""Most answers that are queued at once."""
COLUMNS = ("id", "correct", "extracted", "verdict", "seconds")


def main(argv: list[str] | None = None) -> int:
    """Verifies the file; returns 0, 1 if lines were malformed, 2 if it cannot start."""
    escape_terminal()
    arguments = _parse_arguments(argv)
    source = Path(arguments.input)
    target = Path(arguments.output)
    broken = 0
    counts: Counter[str] = Counter()
    unfinished = target.with_name(target.name + ".tmp")
    try:
        _check_files(source, target)
        pool = WorkerPool(
            arguments.workers,
            arguments.timeout,
            rules=Rules(arguments.answer_from, protocol=arguments.loose),
        )
    except ValueError as error:
        print(f"rlmath verify: {error}", file=sys.stderr)
        return 2
    with pool, unfinished.open("w", encoding="ascii") as output_file:
        for identity, verdict in _verified(source, pool):
            if isinstance(verdict, ValueError):
                broken += 1
                print(f"{source}, line {identity}: {verdict}", file=sys.stderr)
                continue
            counts[verdict.verdict] += 1
            counts["correct"] += verdict.correct
            row = {"id": identity} | asdict(verdict) | {"seconds": round(verdict.seconds, 6)}
            output_file.write(json.dumps({key: row[key] for key in COLUMNS}) + "\n")
    os.replace(unfinished, target)
    correct_count = counts.pop("correct", 0)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing"
    print(f"{sum(counts.values())} verified, {correct_count} of them correct; decided by: {kinds}")
    if broken:
        print(f"rlmath verify: {broken} broken lines were skipped", file=sys.stderr)
    return 1 if broken else 0


def _verified(source: Path, pool: WorkerPool) -> Iterator[tuple[Any, Verdict | ValueError]]:
    """(id, verdict) of every line in its order, or (number of the line, what is wrong with it)."""
    waiting: deque[tuple[Any, Future[Verdict]]] = deque()
    size = source.stat().st_size
    with (
        source.open("rb") as stream,
        tqdm(total=size, unit="B", unit_scale=True, desc="verifying") as bar,
    ):
        for number, line in enumerate(stream, start=1):
            bar.update(len(line))
            if not line.strip():
                continue
            try:
                case = _parse_case(line)
            except ValueError as error:
                yield number, error
                continue
            future = pool.submit(case.completion, case.solutions, case.task, question=case.question)
            waiting.append((case.id, future))
            while waiting and (len(waiting) >= WAITING or waiting[0][1].done()):
                identity, future = waiting.popleft()
                yield identity, future.result()
        for identity, future in waiting:
            yield identity, future.result()


@dataclass(frozen=True)
class _Case:
    """A line of the input."""

    id: Any
    """Any JSON, which the output repeats."""
    completion: str
    solutions: list[str]
    task: str
    question: str


def _parse_case(line: bytes) -> _Case:
    """The case of a line; ValueError for a malformed one."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({str(error)[:100]})") from None
    if not isinstance(row, dict):
        raise ValueError("a JSON object is needed")
    missing = [key for key in ("id", "completion", "solutions") if key not in row]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    solutions = row["solutions"]
    task = row.get("task", TASKS[0])
    question = row.get("question", "")
    for key, text in (("completion", row["completion"]), ("question", question)):
        if not isinstance(text, str):
            raise ValueError(f"{key} must be a string")
    if not isinstance(solutions, list) or not all(
        isinstance(solution, str) for solution in solutions
    ):
        raise ValueError("solutions must be a list of strings")
    if not 1 <= len(solutions) <= MAX_SOLUTIONS:
        raise ValueError(f"it has {len(solutions)} solutions; needed: 1 to {MAX_SOLUTIONS}")
    if task not in TASKS:
        raise ValueError(f"task {task!r} cannot be verified; supported: {', '.join(TASKS)}")
    return _Case(row["id"], row["completion"], solutions, task=task, question=question)


def _check_files(source: Path, target: Path) -> None:
    if not source.is_file():
        raise ValueError(f"--input {source}: no such file")
    if not target.parent.is_dir() or target.is_dir() or target.resolve() == source.resolve():
        raise ValueError(
            f"--output {target}: choose another file; needed: one in a folder that is there, not "
            "the input"
        )


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Verify the answers of a file, with the verifier that the trainer uses."
    )
    add = parser.add_argument
    add(
        "--input",
        required=True,
        help='JSONL: {"id", "completion", "solutions": [...], "task"?, "question"?}',
    )
    add("--output", required=True, help="JSONL of results, in the order of the input")
    add("--workers", type=int, default=min(4, os.cpu_count() or 1), help="default: %(default)s")
    add("--timeout", type=float, default=5.0, help="seconds per answer (default: 5)")
    answer_from_help = (
        'where the answer is looked for; "phrase": also after "the answer is", "number": else '
        "the last number"
    )
    add(
        "--answer-from",
        choices=("boxed", "phrase", "number"),
        default="boxed",
        help=answer_from_help,
    )
    add("--loose", action="store_true", help="compare numbers as the Qwen2.5-Math evaluation does")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
