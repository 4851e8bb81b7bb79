"""The arguments of an evaluation that determine its completions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlmath.config.help import all_settings, raise_problems
from rlmath.config.schema import Range, Template
from rlmath.evals.pass_at_k import MOST_SAMPLES
from rlmath.rollout.sampling import request_seed

GREEDY_INDEX = -1
"""Index of the greedy completion; samples are numbered from 0."""


@dataclass(frozen=True)
class Plan:
    """The arguments of launch/evaluate.py that determine what is sampled, by the name of their option."""

    model: Path
    benchmarks: tuple[str, ...]
    data_dir: Path
    output: Path
    greedy: bool = True
    samples: int = 32
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 32768
    max_prompt_tokens: int | None = None
    """Longer prompts count as wrong; None: every prompt must fit."""
    template: Template = "auto"
    seed: int = 1
    limit: int | None = None
    """Number of problems of each benchmark, from the first on; None: all."""

    def __post_init__(self) -> None:
        """Raises ValueError with all problems."""
        settings = all_settings()
        ranges = {
            "samples": (self.samples, Range(0, MOST_SAMPLES)),
            "temperature": (self.temperature, Range(0.01, 100, why="For temperature 0 there is greedy.")),
            "top-p": (self.top_p, settings["validation.top_p"].range),
            "max-new-tokens": (self.max_new_tokens, settings["rollout.max_new_tokens"].range),
            "max-prompt-tokens": (self.max_prompt_tokens, settings["data.max_prompt_tokens"].range),
            "seed": (self.seed, settings["run.seed"].range),
            "limit": (self.limit, Range(1)),
        }
        problems = [
            f"--{name} is {value}; needed: {allowed}. {allowed.why}".rstrip()
            for name, (value, allowed) in ranges.items()
            if value is not None and not allowed.holds(value)
        ]
        templates = settings["data.template"].words
        if self.template not in templates:
            problems.append(f"--template is {self.template!r}; needed: one of {', '.join(templates)}")
        if not self.benchmarks:
            problems.append("--benchmarks is empty; needed: at least one, for example aime24,math_500")
        if not self.greedy and self.samples == 0:
            problems.append("--no-greedy with --samples 0 samples nothing; leave one of the two out")
        raise_problems("the evaluation", problems)

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of the completions of every problem."""
        return (*((GREEDY_INDEX,) if self.greedy else ()), *range(self.samples))


def completion_seed(seed: int, benchmark: str, problem_id: str, index: int) -> int:
    """Seed of one completion. It depends neither on the engine that samples it nor on the other completions."""
    return request_seed(seed, 0, f"{benchmark}/{problem_id}", index)
