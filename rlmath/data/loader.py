"""Prompts of a run's files: which rows are kept, and what became of the others."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.algorithms.types import Prompt
from rlmath.config.help import counted
from rlmath.config.run_files import DATA_REPORT_FILE, UNUSABLE_ROWS_FILE, write_whole
from rlmath.data.files import CHARACTERS_PER_TOKEN, folder_line
from rlmath.data.formats import read_prompts
from rlmath.data.rows import PromptRow, UnusableRow, check_unusable, unusable_lines
from rlmath.data.tokenizer import (
    PromptText,
    prompt_tokens,
    template_of,
    usable_prompts,
    without_template,
)
from rlmath.workers.user_functions import UserFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EXAMPLES = 3
"""Dropped prompts that are shown."""
_START_CHARS = 60
_CHUNK = 1000
"""Prompts tokenized in one call."""


# ---------------------------------------------------------------- what became of the rows


@dataclass(frozen=True)
class DroppedPrompt:
    prompt_id: str
    tokens: int
    reason: str
    """Either "too long" or "empty"."""
    start: str


@dataclass(frozen=True)
class FilterReport:
    """The counts of one file's rows that were kept and dropped, of prompts or of sequences.

    Lengths are tokens, never characters."""

    read: int
    """Rows that could be used, each once."""
    kept: int
    dropped_too_long: int
    longest_dropped_tokens: int
    """Length of the longest dropped row; 0 when nothing was dropped."""
    most_tokens: int | None
    """The limit of tokens; None where rows were only counted, for want of a tokenizer."""
    dropped_empty: int = 0
    """Prompts of which the tokenizer makes no token at all."""
    path: str = ""
    files: str = ""
    """A line with the files of a folder that were read (`files.folder_line`)."""
    form: str = ""
    """A word of data.format, or a function of the user's."""
    repeated: int = 0
    """Rows that an earlier one equals."""
    unusable: tuple[UnusableRow, ...] = ()
    examples: tuple[DroppedPrompt, ...] = ()
    template: str = ""
    """The template around the first prompt that is kept (`tokenizer.template_of`)."""
    first_row: PromptRow | None = None
    """The row of that prompt."""
    setting: str = "data.max_prompt_tokens"
    """The setting that bounds the tokens."""

    @property
    def dropped(self) -> int:
        return self.dropped_too_long + self.dropped_empty

    @property
    def rows(self) -> int:
        return self.read + self.repeated + len(self.unusable)

    def line(self) -> str:
        """One line for the console: what the filter did."""
        name = f"{self.noun} of {self.path}" if self.path else self.noun
        if self.most_tokens is None:
            return f"{name}: {counted(self.read, 'row')}, lengths not counted."
        longest = (
            f" (the longest has {self.longest_dropped_tokens})" if self.dropped_too_long else ""
        )
        return (
            f"{name}: {self.read} read, {self.kept} kept; dropped: {self.dropped_too_long} longer "
            "than "
            f"{self.setting}={self.most_tokens} tokens{longest}, {self.dropped_empty} without any "
            "token."
        )

    @property
    def noun(self) -> str:
        return "Sequences" if self.setting.startswith("sft.") else "Prompts"

    def lines(self) -> tuple[str, ...]:
        """All lines for the console: form, counts, dropped prompts, and unusable rows."""
        form = (f'{self.path} has the form "{self.form}".',) if self.form else ()
        example_lines = tuple(
            f"  dropped, {example.reason} ({example.tokens} tokens): {example.prompt_id!r}, "
            f"which begins {example.start!r}"
            for example in self.examples
        )
        lines = [*filter(None, [self.files]), *form, self.line(), *example_lines]
        if self.repeated:
            lines.append(
                f"  {counted(self.repeated, 'further row')} repeating earlier ones left out."
            )
        if self.unusable:
            left_out = f"  {counted(len(self.unusable), 'row')} cannot be used and left out"
            lines.append(f"{left_out}; a run lists all in {UNUSABLE_ROWS_FILE}:")
            lines += [f"    {line}" for line in unusable_lines(self.path, self.unusable)]
        return tuple(lines)

    def record(self) -> dict:
        """The file's part of data_report.json."""
        counts = {
            "kept": self.kept,
            "too_long": self.dropped_too_long,
            "empty": self.dropped_empty,
            "repeated": self.repeated,
            "unusable": len(self.unusable),
        }
        return {
            "path": self.path,
            "format": self.form,
            "rows": self.rows,
            **counts,
            "shares": {name: count / self.rows for name, count in counts.items()},
            self.setting.partition(".")[2]: self.most_tokens,
            "longest_dropped_tokens": self.longest_dropped_tokens,
            "examples_dropped": [asdict(example) for example in self.examples],
        }


def dropped_share(reports: Sequence[FilterReport]) -> float:
    """Share (0 to 1) that a filter dropped of the prompts that could be used."""
    return sum(report.dropped for report in reports) / max(
        1, sum(report.read for report in reports)
    )


def write_report(folder: str | Path, reports: Sequence[FilterReport]) -> None:
    """Write data_report.json and unusable_rows.jsonl into a folder that exists.

    unusable_rows.jsonl is empty where all rows are used."""
    contents = {
        "prompts": sum(report.kept for report in reports),
        "dropped_share": dropped_share(reports),
        "files": [report.record() for report in reports],
    }
    rows = "".join(f"{json.dumps(asdict(row))}\n" for report in reports for row in report.unusable)
    write_whole(Path(folder) / DATA_REPORT_FILE, json.dumps(contents, indent=2) + "\n")
    write_whole(Path(folder) / UNUSABLE_ROWS_FILE, rows)


# ---------------------------------------------------------------- prompts of a file


def load_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerFast | None,
    max_prompt_tokens: int,
    form: str | UserFunction = "auto",
    template: str | UserFunction = "auto",
    max_unusable_share: float = 0.01,
) -> tuple[list[Prompt], FilterReport]:
    """Prompts of a file or folder that have at most `max_prompt_tokens` tokens, in its order.

    Without a tokenizer, as for a dry run, all prompts are kept and have no tokens. ValueError for a
    file that cannot be read, for a larger share of unusable rows than `max_unusable_share`, and
    when no prompt is left."""
    if max_prompt_tokens < 1:
        raise ValueError(f"data.max_prompt_tokens is {max_prompt_tokens}; it must be at least 1")
    most_characters = CHARACTERS_PER_TOKEN * max_prompt_tokens
    file = read_prompts(path, form, most_characters)
    texts: list[PromptText] = []
    if tokenizer is not None:
        file, texts = usable_prompts(file, template, tokenizer, most_characters)
    rows = len(file.rows) + file.repeated + len(file.unusable)
    check_unusable(path, file.unusable, rows, most=max_unusable_share)
    prompts: list[Prompt] = []
    dropped: list[DroppedPrompt] = []
    first_kept_template = ""
    first_kept_row = None
    for row, text, ids in _tokenized(file.rows, texts, tokenizer):
        if tokenizer is None or 0 < len(ids) <= max_prompt_tokens:
            prompts.append(as_prompt(row, text, ids))
            if len(prompts) == 1 and tokenizer is not None:
                first_kept_template = template_of(row, template, tokenizer)
                first_kept_row = row
        else:
            reason = "too long" if ids else "empty"
            dropped.append(
                DroppedPrompt(row.query_id, len(ids), reason, start=row.prompt[:_START_CHARS])
            )
    empty = sum(dropped_prompt.reason == "empty" for dropped_prompt in dropped)
    report = FilterReport(
        read=len(file.rows),
        kept=len(prompts),
        dropped_too_long=len(dropped) - empty,
        longest_dropped_tokens=max(
            (dropped_prompt.tokens for dropped_prompt in dropped), default=0
        ),
        most_tokens=None if tokenizer is None else max_prompt_tokens,
        dropped_empty=empty,
        path=path,
        files=folder_line(path),
        form=file.form,
        repeated=file.repeated,
        unusable=tuple(file.unusable),
        examples=tuple(dropped[:EXAMPLES]),
        template=first_kept_template,
        first_row=first_kept_row,
    )
    if not file.rows:
        reasons = "".join(f"\n    {line}" for line in unusable_lines(path, file.unusable))
        raise ValueError(f"{path}: no row can be used. How many, and why:{reasons}")
    if not prompts:
        raise ValueError(
            f"{path}: all {report.read} prompts are longer than"
            f" data.max_prompt_tokens={max_prompt_tokens} tokens (the longest has "
            f"{report.longest_dropped_tokens})"
            " or have no token at all; raise data.max_prompt_tokens, or give prompts that this "
            "tokenizer knows"
        )
    return prompts, report


def as_prompt(row: PromptRow, text: str, token_ids: Sequence[int]) -> Prompt:
    ids = tuple(token_ids)
    return Prompt(
        row.query_id,
        text,
        token_ids=ids,
        solutions=row.solutions,
        task=row.task,
        more_json=row.more_json,
        problem_key=problem_key(row.prompt),
        question=without_template(row.prompt),
    )


def problem_key(problem: str) -> int:
    """A number above 0 that is equal for texts that differ only in details of writing.

    These are white space, case, dollars, a last mark and our templates.

    >>> problem_key("What is $47 + 85$?") == problem_key("what is 47+85") != problem_key("What is 47-85?")
    True
    """
    plain = "".join(without_template(problem).casefold().replace("$", "").split()).rstrip(".?:=")
    return 1 + int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=7).digest(), "big")


def _tokenized(
    rows: list[PromptRow], texts: list[PromptText], tokenizer: PreTrainedTokenizerFast | None
) -> Iterator[tuple[PromptRow, str, list[int]]]:
    """(row, text, tokens) of every row.

    Without a tokenizer the text is the problem as it stands, and there are no tokens."""
    if tokenizer is None:
        yield from ((row, row.prompt, []) for row in rows)
        return
    for start in range(0, len(rows), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        token_ids = prompt_tokens(chunk, tokenizer)
        for row, prompt, ids in zip(rows[start : start + _CHUNK], chunk, token_ids, strict=True):
            yield row, prompt.text, ids


# ---------------------------------------------------------------- several files


def check_weights(paths: Sequence[str], weights: Sequence[float]) -> None:
    """ValueError where there is not one weight for each file, or a file comes twice."""
    if weights and len(weights) != len(paths):
        raise ValueError(
            f"data.train_weights has {len(weights)} numbers for {len(paths)} files "
            "(data.train_path, then "
            "data.more_train_paths); give one for each, or none"
        )
    places = [os.path.realpath(path) for path in paths]
    repeated_paths = [
        path for number, path in enumerate(paths) if places[number] in places[:number]
    ]
    if repeated_paths:
        raise ValueError(
            f"data.more_train_paths: {repeated_paths[0]!r} is there twice; to have its prompts "
            "more often, use data.train_weights"
        )


def with_unique_names(files: Sequence[tuple[str, Sequence[Prompt]]]) -> list[Prompt]:
    """The prompts of all files, given as (path, prompts), under unique names.

    A name that an earlier file has, too, gets its file's name before it."""
    used_names: set[str] = set()
    renamed: list[Prompt] = []
    for number, (path, prompts) in enumerate(files, start=1):
        names_of_file = {prompt.prompt_id for prompt in prompts}
        for prompt in prompts:
            name = prompt.prompt_id
            if name in used_names:
                name = f"{Path(path).stem}/{name}"
                if name in used_names or name in names_of_file:
                    name = f"{number}:{name}"
                while name in used_names or name in names_of_file:
                    name += "'"
            used_names.add(name)
            renamed.append(prompt if name == prompt.prompt_id else replace(prompt, prompt_id=name))
    return renamed
