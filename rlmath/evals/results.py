"""The numbers of a benchmark's row in the table, from the outcomes of its completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlmath.algorithms.intervals import accuracy_interval
from rlmath.answers.string_match import plain_answer
from rlmath.answers.verifier import FAILURES
from rlmath.evals.benchmarks import Benchmark
from rlmath.evals.completions import CompletionRecord, Key
from rlmath.evals.pass_at_k import Vote, majority_at_k, pass_at_k
from rlmath.evals.plan import GREEDY_INDEX, Plan


@dataclass(frozen=True)
class ProblemResult:
    problem_id: str
    greedy: bool | None
    """Whether the greedy answer is correct; None if there is no greedy completion."""
    right: int
    """Samples with a correct answer."""
    samples: int


Row = dict[str, float | int | str | None]
"""Numbers by the names of the tables' columns; shares from 0 to 1, lengths in tokens."""


@dataclass(frozen=True)
class BenchmarkResult:
    """A row of the tables, and the problems that it is of."""

    row: Row
    problems: tuple[ProblemResult, ...]


def useful_k(samples: int) -> tuple[int, ...]:
    """Powers of two up to the number of samples, and that number.

    >>> useful_k(12)
    (1, 2, 4, 8, 12)
    """
    powers = (2**i for i in range(samples.bit_length()))
    return tuple(sorted({k for k in (*powers, samples) if 1 <= k <= samples}))


def answer_key(answer: str) -> object:
    """A key that is equal for answers that `answers.string_match` finds equal.

    It differs for answers that are equal only by algebra.

    >>> answer_key("0.50") == answer_key("\\\\frac{1}{2}"), answer_key("(C)") == answer_key("C) 12")
    (True, True)
    >>> answer_key("x+1") == answer_key("1+x")
    False
    """
    plain = plain_answer(answer)
    if plain is None:
        return answer
    if plain.number is not None:
        return plain.number
    return ("choice", plain.choice.letter) if plain.choice is not None else plain.key


def result_of(
    benchmark: Benchmark,
    records: Mapping[Key, CompletionRecord],
    plan: Plan,
    max_prompt_tokens: int,
) -> BenchmarkResult:
    """The row of a benchmark.

    It has mean lengths, accuracies with their 95% intervals (`accuracy_interval`), pass@k, maj@k,
    and shares of truncated completions, of the modes that the plan has. Problems with longer
    prompts count as wrong (`too_long`), and so do completions whose verification failed
    (`not_judged`); `unusable` rows of the file are not in `num_questions`. KeyError if a problem
    lacks a completion."""
    fitting = [
        problem for problem in benchmark.problems if len(problem.token_ids) <= max_prompt_tokens
    ]
    rows = {
        problem.prompt_id: {index: records[problem.prompt_id, index] for index in plan.indices}
        for problem in fitting
    }
    problems = tuple(
        _problem(problem.prompt_id, rows.get(problem.prompt_id, {}), plan)
        for problem in benchmark.problems
    )
    greedy = [row[GREEDY_INDEX] for row in rows.values()] if plan.greedy else []
    sampled = [[row[index] for index in range(plan.samples)] for row in rows.values()]
    flat = [record for row in sampled for record in row]
    correct = [float(bool(problem.greedy)) for problem in problems] if plan.greedy else []
    shares = [problem.right / plan.samples for problem in problems] if plan.samples else []
    row: Row = {
        "dataset": benchmark.name,
        "num_questions": len(problems),
        "greedy_length": _mean([record.tokens for record in greedy]),
        "sample_length": _mean([record.tokens for record in flat]),
        "greedy_acc": _mean(correct),
    }
    if plan.samples:
        row |= _pass_and_majority(problems, sampled, plan.samples)
    row["greedy_acc_low"], row["greedy_acc_high"] = (
        accuracy_interval(correct) if correct else (None, None)
    )
    row["sample_pass@1_low"], row["sample_pass@1_high"] = (
        accuracy_interval(shares, plan.samples) if shares else (None, None)
    )
    row["greedy_truncated"] = _mean([record.truncated for record in greedy])
    row["sample_truncated"] = _mean([record.truncated for record in flat])
    row["too_long"] = len(problems) - len(fitting)
    row["unusable"] = benchmark.unusable
    row["not_judged"] = sum(record.verdict in FAILURES for record in (*greedy, *flat))
    return BenchmarkResult(row, problems)


def _problem(problem_id: str, row: Mapping[int, CompletionRecord], plan: Plan) -> ProblemResult:
    greedy = bool(row and row[GREEDY_INDEX].correct) if plan.greedy else None
    correct = sum(record.correct for index, record in row.items() if index != GREEDY_INDEX)
    return ProblemResult(problem_id, greedy, correct, plan.samples)


def _pass_and_majority(
    problems: Sequence[ProblemResult], rows: Sequence[Sequence[CompletionRecord]], n: int
) -> Row:
    """pass@k and maj@k of `n` samples of each problem.

    The majority of a problem without a row is wrong."""
    shares: Row = {}
    for k in useful_k(n):
        name = "sample_pass@1" if k == 1 else f"pass@{k}"
        shares[name] = fmean(pass_at_k(n, problem.right, k) for problem in problems)
    votes = [_votes(row) for row in rows]
    for k in useful_k(n)[1:]:
        majorities = (majority_at_k(problem_votes, blank, k) for problem_votes, blank in votes)
        shares[f"maj@{k}"] = sum(majorities) / len(problems)
    return shares


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _votes(row: Sequence[CompletionRecord]) -> tuple[list[Vote], int]:
    """(votes for the answers of a problem's samples, number of samples without an answer)"""
    groups: dict[object, list[bool]] = defaultdict(list)
    for record in row:
        if record.extracted:
            groups[answer_key(record.extracted)].append(record.correct)
    votes = [Vote(len(judgements), any(judgements)) for judgements in groups.values()]
    return votes, len(row) - sum(vote.count for vote in votes)
