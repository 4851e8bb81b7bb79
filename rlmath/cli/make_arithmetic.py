"""Makes the demo's problems: additions, as training and held-out files, and worked solutions to learn from.

  python -m rlmath.cli.make_arithmetic --output data/arithmetic --seed 1 --train 8000 --heldout 500

writes train.jsonl and heldout.jsonl, one row a line in the AReaL-boba form:

    {"prompt": "47+85=", "task": "math", "query_id": "add-47-85", "solutions": ["\\\\boxed{132}"]}

No problem is in both files; `47+85` and `85+47` are two problems. The worked solution of this one is

    7+5=12 4+8+1=13 \\boxed{132}

one step per column, lowest first, the carry as a third term.

worked.jsonl has such solutions of training problems, drawn with repetition, for `rlmath sft`, and worked_heldout.jsonl
of held-out problems (`sft.held_out_path`):

    {"prompt": "47+85=", "completion": "7+5=12 4+8+1=13 \\boxed{132}"}

Every result in them slips with some probability (`worked_solution`), so that a model that learns from them learns
both: the right result is its most likely next token nearly everywhere, and a slip has the probability it had in the
file. Its greedy answers are right, while those sampled at temperature 1 are right about as often as those of the file
(40%; a little less often, as it also slips where it has not learned enough), and that is the gap that GRPO closes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.convert.sources import check_output

MAX_DIGITS = 6
"""More columns than this do not fit the demo's model."""

SLIP = 0.20154
"""It leaves 40% of the worked solutions of two digits right: of two columns and three digits 0.81^2 x 0.82^3."""
_COLUMN_SUMS = 20
"""A slip in a column writes one of 0..19: two digits and a carry make at most 19."""


@dataclass(frozen=True)
class Addition:
    """One problem, such as 47+85."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model is given: `47+85=`."""
        return f"{self.left}+{self.right}="

    @property
    def solution(self) -> str:
        """The right answer as it is to be written: `\\boxed{132}`."""
        return f"\\boxed{{{self.left + self.right}}}"

    def row(self) -> dict[str, object]:
        """The line of the JSONL file."""
        return {
            "prompt": self.prompt,
            "task": "math",
            "query_id": f"add-{self.left}-{self.right}",
            "solutions": [self.solution],
        }


def make_problems(
    seed: int, train: int, heldout: int, digits: int = 2
) -> tuple[list[Addition], list[Addition]]:
    """Training and held-out problems: distinct pairs of numbers below 10**digits, the same for the same seed.

    Raises ValueError for counts below 1, digits out of range, or more rows than distinct problems.
    """
    if not 1 <= digits <= MAX_DIGITS:
        raise ValueError(f"digits is {digits}; it must be from 1 to {MAX_DIGITS}")
    if train < 1 or heldout < 1:
        raise ValueError(f"train is {train} and heldout is {heldout}; both must be at least 1")
    numbers = 10**digits
    if train + heldout > numbers**2:
        raise ValueError(
            f"{train} training and {heldout} held-out rows asked, but numbers of up to {digits} digits make"
            f" only {numbers**2} distinct problems: ask for fewer rows or raise digits"
        )
    picks = random.Random(seed).sample(range(numbers**2), train + heldout)
    problems = [Addition(*divmod(pick, numbers)) for pick in picks]
    return problems[:train], problems[train:]


def worked_solution(problem: Addition, slip: float = 0.0, rng: random.Random | None = None) -> str:
    """Steps and boxed answer; with `slip` above 0, each result written is a random one with that probability.

    What follows a slip is consistent with it: the carry and the answer are read off the sums as written. So
    47+85 with a slip in its first column may read `7+5=3 4+8=12 \\boxed{123}`. A slip in the answer replaces
    one digit. A random result can be the right one.
    """
    if not 0.0 <= slip < 1.0 or (slip > 0.0 and rng is None):
        raise ValueError(f"slip is {slip}; it must be at least 0 and below 1, and above 0 it needs rng")
    columns = _columns(problem)
    steps: list[str] = []
    answer = ""
    carry = 0
    for terms in columns:
        terms = [*terms, carry] if carry else terms
        total = rng.randrange(_COLUMN_SUMS) if slip and rng.random() < slip else sum(terms)
        steps.append("+".join(map(str, terms)) + f"={total}")
        carry, digit = divmod(total, 10)
        answer = f"{digit}{answer}"
    answer = str(int(f"{carry}{answer}"))
    if slip:
        answer = "".join(str(rng.randrange(10)) if rng.random() < slip else digit for digit in answer)
    return " ".join(steps) + f" \\boxed{{{answer}}}"


def _columns(problem: Addition) -> list[list[int]]:
    """The digits to add, lowest column first: 347+85 gives [[7, 5], [4, 8], [3]]."""
    left, right = str(problem.left)[::-1], str(problem.right)[::-1]
    length = max(len(left), len(right))
    return [[int(number[i]) for number in (left, right) if i < len(number)] for i in range(length)]


def worked_rows(problems: list[Addition], count: int, slip: float, seed: int) -> list[dict[str, object]]:
    """So many worked solutions of problems that are drawn at random, with slips (`worked_solution`)."""
    rng = random.Random(f"{seed}:worked")
    return [
        {"prompt": problem.prompt, "completion": worked_solution(problem, slip, rng)}
        for problem in rng.choices(problems, k=count)
    ]


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Reads the command line and writes the files."""
    parser = argparse.ArgumentParser(
        description="Writes additions: train, heldout, worked and worked_heldout.jsonl."
    )
    parser.add_argument("--output", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same files (default 1)")
    parser.add_argument("--train", type=int, default=8000, help="rows of train.jsonl (default 8000)")
    parser.add_argument("--heldout", type=int, default=500, help="rows of heldout.jsonl (default 500)")
    parser.add_argument("--digits", type=int, default=2, help="most digits of a number (default 2)")
    parser.add_argument("--worked", type=int, default=20000, help="rows of worked.jsonl (default 20000)")
    slip_help = f"probability that a number of a worked solution is a random one (default {SLIP})"
    parser.add_argument("--slip", type=float, default=SLIP, help=slip_help)
    args = parser.parse_args(argv)
    if args.worked < 0:
        raise ValueError(f"--worked is {args.worked}; it must be at least 0")
    train, heldout = make_problems(args.seed, args.train, args.heldout, args.digits)
    worked = worked_rows(train, args.worked, args.slip, args.seed)
    worked_heldout = worked_rows(heldout, min(args.worked, len(heldout)), args.slip, args.seed)
    check_output(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("train", [problem.row() for problem in train]),
        ("heldout", [problem.row() for problem in heldout]),
        ("worked", worked),
        ("worked_heldout", worked_heldout),
    ):
        _write(args.output / f"{name}.jsonl", rows)
    print(f"{args.output}: {len(train)} problems, {len(heldout)} held out, {len(worked)} worked solutions")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"make_arithmetic: {error}", file=sys.stderr)
        sys.exit(2)
