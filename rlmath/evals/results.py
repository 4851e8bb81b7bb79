"""The numbers of a benchmark's row in the table, from the outcomes of its completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlmath.answers.string_match import plain_answer
from rlmath.answers.verifier import FAILURES
from rlmath.evals.benchmarks import Benchmark
from rlmath.evals.completions import Key, Outcome
from rlmath.evals.pass_at_k import Vote, bootstrap_interval, majority_at_k, pass_at_k
from rlmath.evals.plan import GREEDY_INDEX, Plan


@dataclass(frozen=True)
class ProblemResult:
    """The counts of one problem."""

    problem_id: str
    greedy: bool | None
    """Whether the greedy answer is correct; None if there is no greedy completion."""
    right: int
    """Samples with a correct answer."""
    samples: int


@dataclass(frozen=True)
class GreedyResult:
    """One completion of every problem at temperature 0. Shares are from 0 to 1."""

    length: float | None
    """Mean tokens of a completion, without prompts that are too long."""
    accuracy: float
    interval: tuple[float, float]
    """95% interval of `accuracy`, by bootstrap over problems."""
    truncated: float | None
    """Share of completions that reached the length limit."""


@dataclass(frozen=True)
class SampledResult:
    """Several completions of every problem."""

    samples: int
    length: float | None
    pass_at: dict[int, float]
    """By k."""
    interval: tuple[float, float]
    """95% interval of pass@1, by bootstrap over problems."""
    maj_at: dict[int, float]
    """By k."""
    truncated: float | None


@dataclass(frozen=True)
class BenchmarkResult:
    """A row of the table."""

    dataset: str
    num_questions: int
    greedy: GreedyResult | None
    """None if there are no greedy completions."""
    sampled: SampledResult | None
    too_long: int
    """Questions whose prompts are too long; they count as wrong."""
    unusable: int
    """Rows of the file that are not usable questions; not in `num_questions`."""
    not_judged: int
    """Completions whose verification failed (time limit, error); they count as wrong."""
    problems: tuple[ProblemResult, ...]


def useful_k(samples: int) -> tuple[int, ...]:
    """Powers of two up to the number of samples, and that number.

    >>> useful_k(12)
    (1, 2, 4, 8, 12)
    """
    powers = (2**i for i in range(samples.bit_length()))
    return tuple(sorted({k for k in (*powers, samples) if 1 <= k <= samples}))


def answer_key(answer: str) -> object:
    """A key that is equal for answers that `answers.string_match` finds equal: the same string, plain number or
    letter of choice. Answers that are equal only by algebra have different keys.

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
    benchmark: Benchmark, outcomes: Mapping[Key, Outcome], plan: Plan, max_prompt_tokens: int
) -> BenchmarkResult:
    """The row of a benchmark. Problems with longer prompts count as wrong; KeyError if another problem lacks a
    completion."""
    fitting = [p for p in benchmark.problems if len(p.token_ids) <= max_prompt_tokens]
    rows = {p.problem_id: {index: outcomes[p.problem_id, index] for index in plan.indices} for p in fitting}
    problems = tuple(_problem(p.problem_id, rows.get(p.problem_id, {}), plan) for p in benchmark.problems)
    first = [row[GREEDY_INDEX] for row in rows.values()] if plan.greedy else []
    sampled = [[row[index] for index in range(plan.samples)] for row in rows.values()]
    used = [*first, *(outcome for row in sampled for outcome in row)]
    return BenchmarkResult(
        dataset=benchmark.name,
        num_questions=len(problems),
        greedy=_greedy(problems, first, plan.seed) if plan.greedy else None,
        sampled=_sampled(problems, sampled, plan) if plan.samples else None,
        too_long=len(problems) - len(fitting),
        unusable=benchmark.unusable,
        not_judged=sum(outcome.verdict in FAILURES for outcome in used),
        problems=problems,
    )


def _problem(problem_id: str, row: Mapping[int, Outcome], plan: Plan) -> ProblemResult:
    greedy = bool(row and row[GREEDY_INDEX].correct) if plan.greedy else None
    right = sum(outcome.correct for index, outcome in row.items() if index != GREEDY_INDEX)
    return ProblemResult(problem_id, greedy, right, plan.samples)


def _greedy(problems: Sequence[ProblemResult], outcomes: Sequence[Outcome], seed: int) -> GreedyResult:
    values = [float(bool(problem.greedy)) for problem in problems]
    length, truncated = _lengths(outcomes)
    return GreedyResult(length, fmean(values), bootstrap_interval(values, seed), truncated)


def _sampled(
    problems: Sequence[ProblemResult], rows: Sequence[Sequence[Outcome]], plan: Plan
) -> SampledResult:
    n = plan.samples
    length, truncated = _lengths([outcome for row in rows for outcome in row])
    pass_at = {k: fmean(pass_at_k(n, problem.right, k) for problem in problems) for k in useful_k(n)}
    votes = [_votes(row) for row in rows]
    maj_at = {k: sum(majority_at_k(*vote, k) for vote in votes) / len(problems) for k in useful_k(n) if k > 1}
    interval = bootstrap_interval([problem.right / n for problem in problems], plan.seed)
    return SampledResult(n, length, pass_at=pass_at, interval=interval, maj_at=maj_at, truncated=truncated)


def _lengths(outcomes: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """(mean tokens, share of truncated completions)"""
    if not outcomes:
        return None, None
    return fmean(outcome.tokens for outcome in outcomes), fmean(outcome.truncated for outcome in outcomes)


def _votes(row: Sequence[Outcome]) -> tuple[list[Vote], int]:
    """(votes for the answers of a problem's samples, number of samples without an answer)"""
    groups: dict[object, list[bool]] = defaultdict(list)
    for outcome in row:
        if outcome.answer:
            groups[answer_key(outcome.answer)].append(outcome.correct)
    votes = [Vote(len(right), any(right)) for right in groups.values()]
    return votes, len(row) - sum(vote.count for vote in votes)
