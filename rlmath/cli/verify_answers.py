"""Verify the answers of a file, with the verifier that the trainer uses.

    rlmath verify --input cases.jsonl --output verdicts.jsonl --workers 2

Each input line is {"id", "completion", "solutions": [...]} with an optional "task"; each output line, in the order of
the input, {"id", "correct", "extracted", "verdict", "seconds"}. Malformed lines are reported by number on stderr and
skipped; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from rlmath.answers.verifier import MAX_SOLUTIONS, TASKS, Rules, Verdict
from rlmath.config.terminal import escape_terminal
from rlmath.workers.worker_pool import WorkerPool

WAITING = 4096
"""Most answers that are queued at once."""


def main(arguments: list[str] | None = None) -> int:
    """Verifies the file; returns 0, 1 if lines were malformed, 2 if it cannot start."""
    escape_terminal()
    options = _parse_arguments(arguments)
    source, target = Path(options.input), Path(options.output)
    problem = _problem(source, target)
    if problem:
        print(f"rlmath verify: {problem}", file=sys.stderr)
        return 2
    rules = Rules(options.answer_from, protocol=options.loose)
    try:
        pool = WorkerPool(options.workers, options.timeout, rules=rules)
    except ValueError as error:
        print(f"rlmath verify: {error}", file=sys.stderr)
        return 2
    unfinished = target.with_name(target.name + ".tmp")
    with pool, unfinished.open("w", encoding="ascii") as out:
        verdicts, broken = _verify_all(source, pool, out)
    os.replace(unfinished, target)
    right = verdicts.pop("correct", 0)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(verdicts.items())) or "nothing"
    print(f"{sum(verdicts.values())} verified, {right} of them correct; decided by: {kinds}")
    if broken:
        print(f"rlmath verify: {broken} broken lines were skipped", file=sys.stderr)
    return 1 if broken else 0


def _verify_all(source: Path, pool: WorkerPool, out: TextIO) -> tuple[Counter[str], int]:
    """(counts by verdict, and of "correct"; number of malformed lines)."""
    counts: Counter[str] = Counter()
    broken = 0
    waiting: deque[tuple[Any, Future[Verdict]]] = deque()

    def write_first() -> None:
        identity, future = waiting.popleft()
        verdict = future.result()
        counts[verdict.verdict] += 1
        counts["correct"] += verdict.correct
        row = {
            "id": identity,
            "correct": verdict.correct,
            "extracted": verdict.extracted,
            "verdict": verdict.verdict,
            "seconds": round(verdict.seconds, 6),
        }
        out.write(json.dumps(row) + "\n")

    size = source.stat().st_size
    with source.open("rb") as stream, tqdm(total=size, unit="B", unit_scale=True, desc="verifying") as bar:
        for number, line in enumerate(stream, start=1):
            bar.update(len(line))
            try:
                case = _parse_case(line)
            except ValueError as error:
                broken += 1
                bar.write(f"{source}, line {number}: {error}", file=sys.stderr)
                continue
            if case is None:
                continue
            identity, completion, solutions, task = case
            waiting.append((identity, pool.submit(completion, solutions, task)))
            while len(waiting) >= WAITING or (waiting and waiting[0][1].done()):
                write_first()
        while waiting:
            write_first()
    return counts, broken


def _parse_case(line: bytes) -> tuple[Any, str, list[str], str] | None:
    """(id, completion, solutions, task); None for a blank line. Raises ValueError for a malformed one."""
    try:
        row = json.loads(line.decode("utf-8-sig")) if line.strip() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({str(error)[:100]})") from None
    if row is None and not line.strip():
        return None
    if not isinstance(row, dict):
        raise ValueError("a JSON object is needed")
    missing = [key for key in ("id", "completion", "solutions") if key not in row]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    if not isinstance(row["completion"], str):
        raise ValueError("completion must be a string")
    solutions = row["solutions"]
    if not isinstance(solutions, list) or not solutions or not all(isinstance(one, str) for one in solutions):
        raise ValueError("solutions must be a list of at least one string")
    if len(solutions) > MAX_SOLUTIONS:
        raise ValueError(f"it has {len(solutions)} solutions; at most {MAX_SOLUTIONS} are compared with")
    task = row.get("task", TASKS[0])
    if task not in TASKS:
        raise ValueError(f"task {task!r} cannot be verified; supported: {', '.join(TASKS)}")
    return row["id"], row["completion"], solutions, task


def _problem(source: Path, target: Path) -> str | None:
    if not source.is_file():
        return f"--input {source}: no such file"
    if not target.parent.is_dir():
        return f"--output {target}: there is no folder {target.parent}"
    if target.is_dir() or target.resolve() == source.resolve():
        return f"--output {target}: choose another file; this one is {'a folder' if target.is_dir() else 'the input'}"
    return None


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Verify the answers of a file, with the verifier that the trainer uses."
    )
    parser.add_argument(
        "--input", required=True, help='JSONL: {"id", "completion", "solutions": [...], "task"?}'
    )
    parser.add_argument("--output", required=True, help="JSONL of results, in the order of the input")
    parser.add_argument(
        "--workers", type=int, default=min(4, os.cpu_count() or 1), help="default: %(default)s"
    )
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds per answer (default: 5)")
    parser.add_argument(
        "--answer-from",
        choices=("boxed", "phrase", "number"),
        default="boxed",
        help='where the answer is looked for; "phrase": also after "the answer is", "number": else the last number',
    )
    parser.add_argument(
        "--loose", action="store_true", help="compare numbers as the Qwen2.5-Math evaluation does"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
