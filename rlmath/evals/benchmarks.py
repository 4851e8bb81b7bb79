"""Loads benchmarks by name, applies the chat template and tokenizes them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.algorithms.types import Prompt
from rlmath.answers.verifier import check_tasks
from rlmath.config.files import read_json_object
from rlmath.config.help import nearest_word
from rlmath.config.model_shape import cpu_head_dim_problem
from rlmath.data.audit import audit_benchmarks
from rlmath.data.formats import read_prompts
from rlmath.data.rows import unusable_lines
from rlmath.data.tokenizer import prompt_tokens, usable_prompts, without_template
from rlmath.workers.user_functions import UserFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUFFIXES = (".jsonl", ".json", ".parquet", "")
"""Suffixes of a benchmark's file, in the order of the search.

"" is a folder of a Hugging Face data set."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class Problem(Prompt):
    """One problem of a benchmark, as training has it."""

    benchmark: str = ""

    @property
    def prompt_hash(self) -> str:
        """Hash of all that its completions and their verification depend on.

        These are tokens, solutions and task."""
        content = json.dumps([self.token_ids, self.solutions, self.task])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Benchmark:
    name: str
    problems: tuple[Problem, ...]
    unusable: int
    """Rows of the file that are not usable problems; not in the table."""


def find_benchmark(name: str, data_dir: Path) -> Path:
    """The file or folder of a benchmark.

    ValueError if there is none."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"--benchmarks: {name!r} is no name of a benchmark; needed: names such as "
            "aime24,math_500"
        )
    if not data_dir.is_dir():
        raise ValueError(
            f'--data-dir: there is no folder "{data_dir}"; give the one that holds {name}.jsonl'
        )
    for suffix in SUFFIXES:
        path = data_dir / f"{name}{suffix}"
        if path.is_dir() if suffix == "" else path.is_file():
            return path
    names = sorted({path.stem for path in data_dir.iterdir() if path.suffix in SUFFIXES})
    raise ValueError(
        f'--benchmarks: "{data_dir}" has no {name}.jsonl, .json, .parquet or folder '
        f"{name}.{nearest_word(name, names)}"
        f" There is: {', '.join(names[:30]) or 'nothing of that kind'}."
    )


def load_benchmark(
    name: str,
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    template: str | UserFunction,
    limit: int | None = None,
    verified: bool = True,
) -> Benchmark:
    """The first `limit` problems of a file (None: all).

    ValueError where it cannot be read, has no problems, or tasks that cannot be verified, if they
    are."""
    file, prompts = usable_prompts(read_prompts(str(path)), template, tokenizer, limit=limit)
    rows = file.rows
    if not rows:
        reasons = "".join(f"\n    {line}" for line in unusable_lines(str(path), file.unusable))
        raise ValueError(
            f"{path} has no problem that can be used ({len(file.unusable)} rows cannot):{reasons}"
        )
    if verified:
        check_tasks(row.task for row in rows)
    tokens = prompt_tokens(prompts, tokenizer)
    empty = [row.query_id for row, ids in zip(rows, tokens, strict=True) if not ids]
    if empty:
        raise ValueError(
            f"{path}: the model's tokenizer makes no token of the problem {empty[0][:60]!r}"
        )
    problems = [
        Problem(
            row.query_id,
            prompt.text,
            token_ids=tuple(ids),
            solutions=row.solutions,
            task=row.task,
            more_json=row.more_json,
            question=without_template(row.prompt),
            benchmark=name,
        )
        for row, prompt, ids in zip(rows, prompts, tokens, strict=True)
    ]
    return Benchmark(name, tuple(problems), len(file.unusable))


def benchmark_warnings(
    benchmarks: Sequence[Benchmark], tokenizer: PreTrainedTokenizerFast, verified: bool
) -> tuple[str, ...]:
    """Warnings about problems whose prompts end before the answer.

    Where they are `verified`, also about those without a reference that an answer could equal,
    which are wrong whatever the model says."""
    files = [(benchmark.name, benchmark.problems) for benchmark in benchmarks]
    return audit_benchmarks(files, tokenizer, verified)


@dataclass(frozen=True)
class LengthLimits:
    """The longest sequences of the engine."""

    max_prompt_tokens: int
    """Longer prompts are not sampled, and count as wrong."""
    max_new_tokens: int


def check_lengths(
    problems: Sequence[Problem],
    positions: int | None,
    max_new_tokens: int | None,
    max_prompt_tokens: int | None,
    default_new_tokens: int,
    tool_tokens: int = 0,
) -> LengthLimits:
    """Length limits of an evaluation.

    ValueError if a prompt and its completion, with the `tool_tokens` that tools may write into it,
    may be longer than the model's `positions` (None: unknown). Without `max_new_tokens` they are
    `default_new_tokens`, or what the longest prompt leaves where that is less."""
    longest = max(problems, key=lambda problem: len(problem.token_ids))
    prompt_tokens = len(longest.token_ids) if max_prompt_tokens is None else max_prompt_tokens
    of_model = "" if positions is None else f"{positions} positions of the model"
    if tool_tokens and positions is not None:
        of_model += f", less {tool_tokens} for outputs of tools"
        positions -= tool_tokens
    if max_new_tokens is None:
        room = default_new_tokens if positions is None else positions - prompt_tokens
        max_new_tokens = max(1, min(default_new_tokens, room))
    excess = 0 if positions is None else prompt_tokens + max_new_tokens - positions
    if excess <= 0:
        return LengthLimits(prompt_tokens, max_new_tokens)
    subject = (
        f"the longest prompt ({longest.benchmark}, {longest.prompt_id!r}) has {prompt_tokens}"
        if max_prompt_tokens is None
        else f"--max-prompt-tokens is {prompt_tokens}"
    )
    room = max_new_tokens - excess
    ways = [f"Set --max-new-tokens {room} or less"] if room >= 1 else []
    if positions is not None and positions > max_new_tokens:
        ways.append(
            f"set --max-prompt-tokens {positions - max_new_tokens}, and longer prompts count as "
            "wrong"
        )
    raise ValueError(
        f"{subject}, --max-new-tokens is {max_new_tokens}: together {excess} tokens more than the "
        f"{of_model} (max_position_embeddings). {'; or '.join(ways) or 'Lower both'}."
    )


def check_head_dim(folder: Path) -> None:
    """Refuse head dims of config.json that vLLM's attention on CPU does not have.

    Raises ValueError."""
    values = read_json_object(folder / "config.json")
    head_dim = values.get("head_dim")
    if head_dim is None:
        size = values.get("hidden_size")
        heads = values.get("num_attention_heads")
        head_dim = size // heads if type(size) is int and type(heads) is int and heads > 0 else None
    problem = cpu_head_dim_problem(head_dim) if type(head_dim) is int else None
    if problem is not None:
        raise ValueError(f"--model: {problem}")


def model_positions(folder: Path) -> int | None:
    """`max_position_embeddings` of a model's config.json (tokens), None if it has none."""
    positions = read_json_object(folder / "config.json").get("max_position_embeddings")
    return (
        positions
        if isinstance(positions, int) and not isinstance(positions, bool) and positions > 0
        else None
    )
