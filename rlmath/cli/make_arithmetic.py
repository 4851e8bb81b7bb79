"""Makes the demo's problems, additions, and worked solutions to learn from.

  python -m rlmath.cli.make_arithmetic --output data/arithmetic --seed 1 --train 8000 --heldout 500

writes train.jsonl and heldout.jsonl, one row a line in the AReaL-boba form, and no problem is in
both:

    {"prompt": "47+85=", "task": "math", "query_id": "add-47-85", "solutions": ["\\\\boxed{132}"]}

worked.jsonl has solutions of training problems, drawn with repetition, for `rlmath sft`, and
worked_heldout.jsonl of held-out problems (`sft.held_out_path`): one step per column, lowest first,
the carry as a third term.

    {"prompt": "47+85=", "completion": "7+5=12 4+8+1=13 \\boxed{132}"}

Every result in them slips with some probability (`worked_solution`), so that a model that learns
from them has the right result as its most likely next token nearly everywhere, and slips as often
as the file when it samples at temperature 1: that is the gap that GRPO closes.

With `--operation multiply` the problems are products of three and two digits, which a tiny model
cannot compute. Of the worked solutions, all of them right, a part calls Python, as docs/tool_use.md has it,
and the others answer at once: a model that learns from them guesses, and calls as often as the file,
which GRPO changes.

    {"prompt": "347*85=",
     "completion": "```python\\n347*85\\n```\\n```output\\n29495\\n```\\n\\\\boxed{29495}"}

With `--operation guess` the answer of a problem is one of its two numbers, and nothing says which.
Worked solutions guess, also behind an answer that was called wrong: a model that learns from them
guesses again, and GRPO teaches it to give the other number (docs/turns.md).

    {"prompt": "47?85=\\\\boxed{47}\\nThe answer 47 is not right. Try again.\\n",
     "completion": "\\\\boxed{85}"}
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rlmath.checkpoint.convert.sources import check_output

NUMBERS = 100
"""Numbers are below it."""
SLIP = 0.20154
"""Probability of a slip that leaves 40% of the worked solutions of two digits right.

With two columns and three digits that is 0.81^2 x 0.82^3."""
LEFT_FACTORS = range(100, 1000)
RIGHT_FACTORS = range(10, 100)
CALLING = 0.25
"""Share of the worked products that call Python."""
RETRIES = 0.5
"""Share of the worked guesses that stand behind a wrong answer."""
NOT_RIGHT = "\nThe answer {} is not right. Try again.\n"
"""What a wrong answer is told, as turns.feedback=verdict has it, on lines of its own."""
_COLUMN_SUMS = 20
"""A slip in a column writes one of 0..19: two digits and a carry make at most 19."""


@dataclass(frozen=True)
class Problem(ABC):
    """Two numbers to compute with."""

    operation: ClassVar[str]
    sign: ClassVar[str]
    left: int
    right: int

    @property
    @abstractmethod
    def result(self) -> int:
        """The number that is asked for."""

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.sign}{self.right}="

    @property
    def solution(self) -> str:
        return f"\\boxed{{{self.result}}}"

    def row(self) -> dict[str, object]:
        """The line of the JSONL file."""
        return {
            "prompt": self.prompt,
            "task": "math",
            "query_id": f"{self.operation}-{self.left}-{self.right}",
            "solutions": [self.solution],
        }


class Addition(Problem):
    """One problem, such as 47+85."""

    operation = "add"
    sign = "+"

    @property
    def result(self) -> int:
        return self.left + self.right


class Multiplication(Problem):
    """One problem, such as 347*85."""

    operation = "multiply"
    sign = "*"

    @property
    def result(self) -> int:
        return self.left * self.right

    def solution_with_call(self) -> str:
        """A call of Python, its output, and the answer."""
        call = f"```python\n{self.left}*{self.right}\n```\n"
        return f"{call}```output\n{self.result}\n```\n{self.solution}"


@dataclass(frozen=True)
class Guess(Problem):
    """One problem, such as 47?85, that does not say which of its numbers is asked for."""

    operation = "guess"
    sign = "?"
    is_left: bool

    @property
    def result(self) -> int:
        return self.left if self.is_left else self.right


def make_guesses(seed: int, train: int, heldout: int) -> tuple[list[Guess], list[Guess]]:
    """Training and held-out problems of distinct pairs, whose answers are chance.

    Raises ValueError for counts below 1, or more rows than distinct problems.
    """
    pairs = _distinct_pairs(seed, train, heldout, left=range(NUMBERS), right=range(NUMBERS))
    rng = random.Random(f"{seed}:guesses")
    problems = [Guess(left, right, rng.random() < 0.5) for left, right in pairs]
    return problems[:train], problems[train:]


def worked_guesses(problems: list[Guess], count: int, seed: int) -> list[dict[str, object]]:
    """Guessed answers of `count` problems drawn at random, RETRIES of them behind another one.

    Every guess is one of the two numbers, as likely, whatever the problem's answer is."""
    rng = random.Random(f"{seed}:worked")
    rows: list[dict[str, object]] = []
    for problem in rng.choices(problems, k=count):
        earlier, guess = (replace(problem, is_left=rng.random() < 0.5) for _ in range(2))
        prompt = problem.prompt
        if rng.random() < RETRIES:
            prompt += earlier.solution + NOT_RIGHT.format(earlier.result)
        rows.append({"prompt": prompt, "completion": guess.solution})
    return rows


def make_products(
    seed: int, train: int, heldout: int
) -> tuple[list[Multiplication], list[Multiplication]]:
    """Training and held-out products: distinct pairs of factors, the same for the same seed.

    Raises ValueError for counts below 1, or more rows than distinct problems.
    """
    pairs = _distinct_pairs(seed, train, heldout, left=LEFT_FACTORS, right=RIGHT_FACTORS)
    problems = [Multiplication(left, right) for left, right in pairs]
    return problems[:train], problems[train:]


def worked_products(
    problems: list[Multiplication], count: int, seed: int
) -> list[dict[str, object]]:
    """Right solutions of `count` products drawn at random, CALLING of them with a call."""
    rng = random.Random(f"{seed}:worked")
    return [
        {
            "prompt": problem.prompt,
            "completion": problem.solution_with_call()
            if rng.random() < CALLING
            else problem.solution,
        }
        for problem in rng.choices(problems, k=count)
    ]


def make_problems(seed: int, train: int, heldout: int) -> tuple[list[Addition], list[Addition]]:
    """Training and held-out problems: distinct pairs of numbers, the same for the same seed.

    Raises ValueError for counts below 1, or more rows than distinct problems.
    """
    pairs = _distinct_pairs(seed, train, heldout, left=range(NUMBERS), right=range(NUMBERS))
    problems = [Addition(left, right) for left, right in pairs]
    return problems[:train], problems[train:]


def _distinct_pairs(
    seed: int, train: int, heldout: int, left: range, right: range
) -> list[tuple[int, int]]:
    """A number of each range, `train` and `heldout` pairs of them, drawn at random.

    ValueError for counts below 1, or more than there are pairs."""
    n_pairs = len(left) * len(right)
    if train < 1 or heldout < 1 or train + heldout > n_pairs:
        raise ValueError(
            f"{train} training and {heldout} held-out rows; needed: at least 1 of each, "
            f"{n_pairs} in all at most"
        )
    picks = random.Random(seed).sample(range(n_pairs), train + heldout)
    places = [divmod(pick, len(right)) for pick in picks]
    return [(left[left_place], right[right_place]) for left_place, right_place in places]


def worked_solution(problem: Addition, slip: float = 0.0, rng: random.Random | None = None) -> str:
    """Steps and boxed answer; with `slip` as the probability that a written result is random.

    What follows a slip is consistent with it: the carry and the answer are read off the sums as
    written. So 47+85 with a slip in its first column may read `7+5=3 4+8=12 \\boxed{123}`. A slip
    in the answer replaces one digit. A random result can be the right one.
    """
    steps = []
    answer = ""
    carry = 0
    rng = rng or random.Random(0)
    for terms in _columns(problem):
        terms = [*terms, carry] if carry else terms
        total = rng.randrange(_COLUMN_SUMS) if slip and rng.random() < slip else sum(terms)
        steps.append("+".join(map(str, terms)) + f"={total}")
        carry, digit = divmod(total, 10)
        answer = f"{digit}{answer}"
    answer = str(int(f"{carry}{answer}"))
    if slip:
        answer = "".join(
            str(rng.randrange(10)) if rng.random() < slip else digit for digit in answer
        )
    return " ".join(steps) + f" \\boxed{{{answer}}}"


def _columns(problem: Addition) -> list[list[int]]:
    """The digits to add, lowest column first: 347+85 gives [[7, 5], [4, 8], [3]]."""
    left_digits = str(problem.left)[::-1]
    right_digits = str(problem.right)[::-1]
    length = max(len(left_digits), len(right_digits))
    return [
        [int(number[i]) for number in (left_digits, right_digits) if i < len(number)]
        for i in range(length)
    ]


def worked_rows(
    problems: list[Addition], count: int, slip: float, seed: int
) -> list[dict[str, object]]:
    """Worked solutions, with slips (`worked_solution`), of `count` problems drawn at random."""
    rng = random.Random(f"{seed}:worked")
    return [
        {"prompt": problem.prompt, "completion": worked_solution(problem, slip, rng)}
        for problem in rng.choices(problems, k=count)
    ]


def main(argv: list[str] | None = None) -> None:
    """Reads the command line and writes the files."""
    parser = argparse.ArgumentParser(
        description="Writes additions: train, heldout, worked and worked_heldout.jsonl."
    )
    parser.add_argument(
        "--operation",
        choices=("add", "multiply", "guess"),
        default="add",
        help="multiply: products, solved with a Python tool or guessed; guess: one of two "
        "numbers, the problem does not say which (default add)",
    )
    parser.add_argument("--output", type=Path, required=True, help="new or empty folder")
    parser.add_argument(
        "--seed", type=int, default=1, help="the same seed gives the same files (default 1)"
    )
    for name, rows in (("train", 8000), ("heldout", 500), ("worked", 20000)):
        parser.add_argument(
            f"--{name}", type=int, default=rows, help=f"rows of {name}.jsonl (default {rows})"
        )
    arguments = parser.parse_args(argv)
    if arguments.worked < 0:
        parser.error(f"--worked is {arguments.worked}; needed: at least 0")
    sizes = {"seed": arguments.seed, "train": arguments.train, "heldout": arguments.heldout}
    n_worked_heldout = min(arguments.worked, arguments.heldout)
    if arguments.operation == "multiply":
        train, heldout = make_products(**sizes)
        worked = worked_products(train, arguments.worked, arguments.seed)
        worked_heldout = worked_products(heldout, n_worked_heldout, arguments.seed)
    elif arguments.operation == "guess":
        train, heldout = make_guesses(**sizes)
        worked = worked_guesses(train, arguments.worked, arguments.seed)
        worked_heldout = worked_guesses(heldout, n_worked_heldout, arguments.seed)
    else:
        train, heldout = make_problems(**sizes)
        worked = worked_rows(train, arguments.worked, SLIP, arguments.seed)
        worked_heldout = worked_rows(heldout, n_worked_heldout, SLIP, arguments.seed)
    check_output(arguments.output)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in {
        "train": [problem.row() for problem in train],
        "heldout": [problem.row() for problem in heldout],
        "worked": worked,
        "worked_heldout": worked_heldout,
    }.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (arguments.output / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(
        f"{arguments.output}: {len(train)} problems, {len(heldout)} held out, {len(worked)} worked "
        "solutions"
    )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"make_arithmetic: {error}", file=sys.stderr)
        sys.exit(2)
