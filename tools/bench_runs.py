"""What the benchmarks that train share: results that are kept, runs that take turns, a base model for problems of two
kinds."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools import demo
from tools.make_arithmetic import make_problems, worked_rows

Result = TypeVar("Result")

BASE_SETTINGS = (
    "configs/demo_sft.yaml",
    "tools/demo.py",
    "tools/make_arithmetic.py",
    "tools/make_tiny_model.py",
)
"""What a base model and its accuracy follow from."""


def fingerprint(files: Sequence[str | Path], *values: object) -> str:
    """Of the contents of files of the repository, and of values."""
    digest = hashlib.sha256(repr(values).encode())
    for file in files:
        digest.update((demo.REPOSITORY / file).read_bytes())
    return digest.hexdigest()[:16]


def kept(folder: Path, made_of: str, measure: Callable[[], dict]) -> dict:
    """The result in `folder`, if it was measured with these settings; else `folder` is emptied, of what a stopped
    measurement left as well, and it is measured."""
    result = folder / "result.json"
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8"))
        if found["made_of"] == made_of:
            return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = measure() | {"made_of": made_of}
    unfinished = result.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(result)
    return found


def in_turns(
    bench: str,
    output: Path,
    ways: Sequence[str],
    seeds: Sequence[int],
    learn: Callable[[str, int], Result],
    report: Callable[[str, dict[str, list[Result]]], None],
) -> int:
    """`learn(way, seed)` for every way, seed by seed, so that a machine that gets busier slows all of them; what the
    programs print goes to `output`/log.txt. After a way's last seed `report(way, results by way)`. Exit status 0, that
    of a stage that failed, which ends it, or `demo.INTERRUPTED` after Ctrl-C."""
    found: dict[str, list[Result]] = {}
    for seed, way in itertools.product(seeds, ways):
        try:
            with (
                (output / "log.txt").open("a", encoding="utf-8") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                found.setdefault(way, []).append(learn(way, seed))
        except SystemExit as stage:
            told = "interrupted; the same command resumes"
            if stage.code != demo.INTERRUPTED:
                told = f"{way}, seed {seed}: a stage ended with status {stage.code}; see {output / 'log.txt'}"
            print(f"{bench}: {told}", file=sys.stderr)
            return int(stage.code or 0)
        if len(found[way]) == len(seeds):
            report(way, found)
    return 0


def figure(
    bench: str,
    case: str,
    metric: str,
    value: float | None,
    unit: str,
    baseline: tuple[str, float | None] | None,
    less: bool = False,
) -> None:
    """Print one figure as a JSON object; `baseline` is its name and value, `less` says that less is better. None: what
    was not reached. No ratio where one of the two is 0 or not there."""
    ratio = told = None
    if baseline is not None:
        name, theirs = baseline
        told = f"{name}: not reached" if theirs is None else f"{name}: {theirs:.4f}"
        if value and theirs:
            ratio = round(theirs / value if less else value / theirs, 3)
    shown = None if value is None else round(value, 4)
    row = {"bench": bench, "case": case, "metric": metric, "value": shown, "unit": unit}
    print(json.dumps(row | {"baseline": told, "ratio": ratio}), flush=True)


# ---------------------------------------------------------------- problems of two kinds


@dataclass(frozen=True)
class TwoKinds:
    """Additions of numbers of up to two digits and of numbers of `long_digits`, and a base model that learned both."""

    name: str
    """Of its folder."""
    long_digits: int
    long_share: float
    """Of the problems that GRPO draws from."""
    right_short: float
    right_long: float
    """Shares of the worked solutions that are right."""
    problems: int
    """That GRPO draws from."""
    heldout: int
    """Problems of either kind in the validation."""
    worked: int
    """Worked solutions of the supervised training, half of them long."""
    epochs: int
    """Passes over them."""
    seed: int = 101

    def write_problems(self, folder: Path) -> None:
        """train.jsonl, short.jsonl and long.jsonl (held out), and worked.jsonl."""
        made = make_problems(self.seed, 4000, 8000, long_share=0.5, long_digits=self.long_digits)
        (short, long), (held_short, held_long) = (
            [[one for one in part if (one.left >= 100) == is_long] for is_long in (False, True)]
            for part in made
        )
        longs = round(self.problems * self.long_share)
        train = [*short[: self.problems - longs], *long[:longs]]
        worked = worked_rows(short, self.worked // 2, self.right_short, self.seed)
        worked += worked_rows(long, self.worked - self.worked // 2, self.right_long, self.seed)
        folder.mkdir(parents=True)
        for name, rows in (
            ("train", [one.row() for one in train]),
            ("short", [one.row() for one in held_short[: self.heldout]]),
            ("long", [one.row() for one in held_long[: self.heldout]]),
            ("worked", worked),
        ):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def base(self, output: Path) -> tuple[Path, str]:
        """The folder with `data` and the model `base`, which are made where they are not there; and their
        fingerprint."""
        folder, settings = (
            output / self.name,
            ("sft.max_sequence_tokens=96", f"run.total_epochs={self.epochs}"),
        )

        def make() -> dict:
            self.write_problems(folder / "data")
            model = [sys.executable, "tools/make_tiny_model.py", "--output", str(folder / "random")]
            demo.run("A tiny random model", [*model, "--seed", str(self.seed)], demo.child_environment())
            demo.teach(folder, self.seed, settings)
            return {}

        made_of = fingerprint(BASE_SETTINGS, self, settings)
        kept(folder, made_of, make)
        return folder, made_of
