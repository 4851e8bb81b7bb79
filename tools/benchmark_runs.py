"""What the benchmarks that train share: results that are kept, runs that take turns, a base model for problems of two
kinds."""

from __future__ import annotations

import argparse
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

from rlmath.cli import demo
from rlmath.cli.make_arithmetic import make_problems, worked_rows

REPOSITORY = Path(__file__).resolve().parents[1]
Result = TypeVar("Result")

BASE_SETTINGS = (
    "configs/demo_sft.yaml",
    "rlmath/cli/demo.py",
    "rlmath/cli/make_arithmetic.py",
    "rlmath/cli/make_tiny_model.py",
)
"""What a base model and its accuracy follow from."""


def fingerprint(files: Sequence[str | Path], *values: object) -> str:
    """Of the contents of files of the repository, and of values."""
    digest = hashlib.sha256(repr(values).encode())
    for file in files:
        digest.update((REPOSITORY / file).read_bytes())
    return digest.hexdigest()[:16]


def load_or_measure(folder: Path, made_of: str, measure: Callable[[], dict]) -> dict:
    """The result in `folder`, if it was measured with these settings (of the code it knows nothing); else the folder is
    emptied, of what a stopped measurement left as well, and it is measured. ValueError for a folder with other things
    in it than a measurement's."""
    result, begun = folder / "result.json", folder / ".measurement"
    if result.exists():
        found = json.loads(result.read_text(encoding="utf-8"))
        if found["made_of"] == made_of:
            return found
    elif folder.exists() and not begun.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} holds what no measurement left there; give another --output, or move it away"
        )
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    begun.touch()
    found = measure() | {"made_of": made_of}
    unfinished = result.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(result)
    return found


def run_interleaved(
    bench: str,
    output: Path,
    ways: Sequence[str],
    seeds: Sequence[int],
    learn: Callable[[str, int], Result],
    report: Callable[[str, dict[str, list[Result]]], None],
) -> tuple[int, dict[str, list[Result]]]:
    """`learn(way, seed)` for every way, seed by seed, so that a machine that gets busier slows all of them; what the
    programs print goes to `output`/log.txt. After a way's last seed `report(way, results by way)`. An exit status, and
    the results: 0; that of a stage that failed, which ends it; `demo.INTERRUPTED` after Ctrl-C."""
    found: dict[str, list[Result]] = {}
    for seed, way in itertools.product(seeds, ways):
        try:
            with (
                (output / "log.txt").open("a", encoding="utf-8") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                found.setdefault(way, []).append(learn(way, seed))
        except (SystemExit, ValueError) as stage:
            code = stage.code if isinstance(stage, SystemExit) else str(stage)
            told = f"{way}, seed {seed}: a stage ended with status {code}; see {output / 'log.txt'}"
            if not isinstance(code, int):
                told, code = f"{way}, seed {seed}: {code}", 1
            elif code == demo.INTERRUPTED:
                told = "interrupted; the same command resumes"
            print(f"{bench}: {told}", file=sys.stderr)
            return code, found
        if len(found[way]) == len(seeds):
            report(way, found)
    return 0, found


def open_output(parser: argparse.ArgumentParser, given: Path) -> Path:
    """The folder of --output, made where it is not there; a file in its place is a mistake of the command line."""
    output = given.resolve()
    if output.exists() and not output.is_dir():
        parser.error(f"--output {given}: it is a file; name a folder")
    output.mkdir(parents=True, exist_ok=True)
    return output


def print_figure(
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


TASK_RANKS = 2
"""Of the runs of a `TwoKindTask`."""


@dataclass(frozen=True)
class TwoKindTask:
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
    kind_problems: int = 2000
    """Problems of either kind that training and worked solutions are taken from."""
    seed: int = 101

    def write_problems(self, folder: Path) -> None:
        """train.jsonl, short.jsonl and long.jsonl (held out), and worked.jsonl. ValueError for more problems than
        there are."""
        longs = round(self.problems * self.long_share)
        if max(longs, self.problems - longs) > self.kind_problems:
            raise ValueError(f"{self.problems} problems need more than {self.kind_problems} of a kind")
        numbers = (2 * self.kind_problems, 2 * self.heldout)
        made = make_problems(self.seed, *numbers, long_share=0.5, long_digits=self.long_digits)
        by_kind = [
            [[one for one in part if (one.left >= 100) == long] for long in (False, True)] for part in made
        ]
        short, long = by_kind[0]
        worked = worked_rows(short, self.worked // 2, self.right_short, self.seed)
        worked += worked_rows(long, self.worked - self.worked // 2, self.right_long, self.seed)
        folder.mkdir(parents=True)
        for name, rows in (
            ("train", [one.row() for one in [*short[: self.problems - longs], *long[:longs]]]),
            ("short", [one.row() for one in by_kind[1][0]]),
            ("long", [one.row() for one in by_kind[1][1]]),
            ("worked", worked),
        ):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def make_base_model(self, output: Path) -> tuple[Path, str]:
        """The folder with `data` and the model `base`, which are made where they are not there; and their
        fingerprint."""
        folder = output / self.name
        settings = ("sft.max_sequence_tokens=96", f"run.total_epochs={self.epochs}")

        def make() -> dict:
            self.write_problems(folder / "data")
            model = [sys.executable, "-m", "rlmath.cli.make_tiny_model", "--output", str(folder / "random")]
            demo.run("A tiny random model", [*model, "--seed", str(self.seed)], demo.child_environment())
            demo.teach(folder, self.seed, settings)
            return {}

        made_of = fingerprint(BASE_SETTINGS, self, settings)
        load_or_measure(folder, made_of, make)
        return folder, made_of

    def train(self, output: Path, way: str, arguments: Sequence[str], seed: int, steps: int) -> Path:
        """The folder of a GRPO run of the base model, made where it is not there: configs/demo.yaml on TASK_RANKS
        ranks with `arguments`, files (`--config`) and settings, which `way` names."""
        base, base_of = self.make_base_model(output)
        folder = output / f"{way}_seed_{seed}_steps_{steps}_{self.name}"
        command = [
            *demo.torchrun(TASK_RANKS),
            "-m",
            "rlmath.trainer",
            "--config",
            "configs/demo.yaml",
            *arguments,
        ]
        command += [f"run.output_dir={folder / 'run'}", f"run.seed={seed}", f"run.total_steps={steps}"]
        command += [f"model.path={base / 'base'}", f"data.train_path={base / 'data' / 'train.jsonl'}"]
        command += [f"validation.paths=[{base / 'data' / 'short.jsonl'},{base / 'data' / 'long.jsonl'}]"]

        def run() -> dict:
            demo.run(f"{way}, seed {seed}", command, demo.one_thread())
            return {}

        files = ("configs/demo.yaml", *(one for one in arguments if one.endswith(".yaml")))
        load_or_measure(folder, fingerprint(files, base_of, tuple(arguments), TASK_RANKS), run)
        return folder / "run"
