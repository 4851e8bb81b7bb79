"""What a run reads before it starts: tokenizer and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Prompt
from rlmath.config.length_curriculum import (
    engine_length,
    planned_steps,
    validates,
    validation_names,
    validation_tokens,
)
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, DataConfig
from rlmath.data.filter_report import FilterReport, dropped_share
from rlmath.data.loader import PromptOrder, Share, check_weights, load_prompts, shares_of, with_unique_names
from rlmath.data.readers import PromptFile, PromptRow, read_prompts
from rlmath.data.rows import UnusableRow
from rlmath.data.templates import render
from rlmath.data.tokenizer import load_tokenizer, prompt_tokens, stop_token_ids
from rlmath.rewards.verifier import check_tasks


@dataclass(frozen=True)
class Inputs:
    """The prompts that are left after filtering, and the order of their use."""

    tokenizer: PreTrainedTokenizerFast
    prompts: list[Prompt]
    order: PromptOrder
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion."""
    total_steps: int
    """Steps of the whole run."""
    lines: tuple[str, ...]
    """What the console should say about the data."""
    reports: tuple[FilterReport, ...] = ()
    """What became of the rows, file by file."""

    @property
    def unusable(self) -> tuple[UnusableRow, ...]:
        """Rows of all files that are left out."""
        return tuple(row for report in self.reports for row in report.unusable)

    @property
    def dropped_share(self) -> float:
        """Share of the prompts that a filter dropped (0 to 1)."""
        return dropped_share(self.reports)


def load_inputs(config: Config, shape: ModelShape) -> Inputs:
    """ValueError for unreadable data, too few prompts for one step, or tokens that the model does not know."""
    tokenizer = load_tokenizer(config.model.path)
    data = config.data
    prompts, shares, reports = _load_files(data, tokenizer)
    if config.reward.function is None:
        check_tasks(prompt.task for prompt in prompts)
    _check_vocabulary(prompts, tokenizer, shape.vocab_size)
    order = PromptOrder(len(prompts), data.prompts_per_step, config.run.seed, data.shuffle, shares)
    total_steps = checked_steps(config, order)
    stops = stop_token_ids(config.model.path, tokenizer)
    lines = (*(line for report in reports for line in report.lines()), order.line())
    return Inputs(tokenizer, prompts, order, stops, total_steps, lines, reports)


def train_paths(data: DataConfig) -> list[str]:
    """All files and folders of training prompts."""
    return [data.train_path, *data.more_train_paths]


def _load_files(
    data: DataConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[Prompt], tuple[Share, ...], tuple[FilterReport, ...]]:
    """The prompts of all files one behind the other, how often each file's come, and what became of the rows."""
    paths = train_paths(data)
    check_weights(paths, data.train_weights)
    how = (data.max_prompt_tokens, data.format, data.template, data.max_unusable_share)
    files = [load_prompts(path, tokenizer, *how) for path in paths]
    shares = shares_of([len(prompts) for prompts, _ in files], data.train_weights)
    named = with_unique_names([(path, prompts) for path, (prompts, _) in zip(paths, files, strict=True)])
    return named, shares, tuple(report for _, report in files)


def checked_steps(config: Config, order: PromptOrder) -> int:
    """Steps of the whole run; ValueError where they are too few for the settings, or the prompts are."""
    total_steps = planned_steps(config, order.steps_per_epoch)
    if config.selection.dynamic_sampling is not None:
        _check_extra_prompts(config.selection.max_extra_prompts, order)
    _check_warmup(config, total_steps)
    return total_steps


def _check_vocabulary(prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    largest = max(prompts, key=lambda prompt: max(prompt.token_ids))
    found = max(*largest.token_ids, tokenizer.eos_token_id)
    if found >= vocab_size:
        raise ValueError(
            f'the tokenizer gives token {found} (prompt "{largest.prompt_id}" or its eos_token), the model has '
            f"{vocab_size} (vocab_size in config.json); use the tokenizer that belongs to the model"
        )


def _check_extra_prompts(extra: int, order: PromptOrder) -> None:
    spare = max(0, order.n_prompts - order.prompts_per_step)
    if extra > spare:
        raise ValueError(
            f"selection.max_extra_prompts is {extra}; beyond a step's {order.prompts_per_step} prompts there are only "
            f"{spare}; lower it, or give more prompts"
        )


def most_updates(config: Config, total_steps: int) -> int:
    """Optimizer steps of a run that discards nothing."""
    return total_steps * config.algorithm.n_minibatches * config.algorithm.epochs


def _check_warmup(config: Config, total_steps: int) -> None:
    updates = most_updates(config, total_steps)
    if updates <= config.optimizer.warmup_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps}; the run has {updates} optimizer steps "
            f"({total_steps} steps x {config.algorithm.n_minibatches} minibatches x {config.algorithm.epochs} epochs "
            "over them) and would never reach optimizer.lr; lower it"
        )


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
