"""The problems that a run is validated on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rlmath.config import Config
from rlmath.data.readers import PromptFile, PromptRow, read_prompts
from rlmath.data.templates import render
from rlmath.data.tokenizer import prompt_tokens
from rlmath.rewards.verify import check_tasks
from rlmath.stages import engine_length, validates, validation_names, validation_tokens
from rlmath.types import Prompt


@dataclass(frozen=True)
class ValidationFile:
    """The problems of one file."""

    name: str
    """As its metrics are named: the file's name without its ending."""
    prompts: list[Prompt]
    """What is sampled."""
    too_long: int
    """Problems that leave no room for a whole completion; they count as wrong."""
    unusable: tuple[str, ...]
    """Rows that are left out, each with its reason."""

    @property
    def problems(self) -> int:
        """All that accuracy is a share of."""
        return len(self.prompts) + self.too_long

    def line(self) -> str:
        """For the console."""
        told = f"Validation {self.name}: {self.problems} problems"
        if self.too_long:
            told += f", {self.too_long} of them too long for the context, which count as wrong"
        if self.unusable:
            told += f"; {len(self.unusable)} rows cannot be used ({self.unusable[0]})"
        return told


def load_validation(
    config: Config, tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> tuple[ValidationFile, ...]:
    """What `validation.paths` hold; nothing where the run does not validate.

    Errors: ValueError for a file that cannot be read or has no problem that can be sampled, and for tokens that the
    model does not know.
    """
    if not validates(config):
        return ()
    paths = config.validation.paths
    return tuple(
        _load(name, path, config, tokenizer, vocab_size)
        for name, path in zip(validation_names(paths), paths, strict=True)
    )


def _load(
    name: str, path: str, config: Config, tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> ValidationFile:
    file = read_prompts(path)
    room = engine_length(config) - validation_tokens(config)
    template = config.validation.template or config.data.template
    prompts = [prompt for prompt in _prompts(file.rows, template, tokenizer) if len(prompt.token_ids) <= room]
    if not prompts:
        raise ValueError(
            f"validation.paths: {path} has no problem to sample: {len(file.rows)} can be read, and none of them leaves "
            f"room for {validation_tokens(config)} new tokens in a context of {engine_length(config)}. "
            "Take it out, lower validation.max_new_tokens, or raise data.max_prompt_tokens"
        )
    if config.reward.function is None:
        check_tasks(prompt.task for prompt in prompts)
    largest = max(max(prompt.token_ids) for prompt in prompts)
    if largest >= vocab_size:
        raise ValueError(
            f"validation.paths: {path} has token {largest}, and the model only {vocab_size} (vocab_size in "
            "config.json); use the tokenizer that belongs to the model"
        )
    return ValidationFile(name, prompts, len(file.rows) - len(prompts), _unusable(file))


def _prompts(
    rows: Sequence[PromptRow], template: str, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Prompt]:
    """Those that have any token."""
    for row in rows:
        text = render(row, template, tokenizer)
        (token_ids,) = prompt_tokens([text], tokenizer)
        if token_ids:
            yield Prompt(row.query_id, text, tuple(token_ids), row.solutions, row.task, row.more_json)


def _unusable(file: PromptFile) -> tuple[str, ...]:
    return tuple(f"{row.where}: {row.reason}" for row in file.unusable)
