"""All data that a run reads before it starts: tokenizer, prompts or sequences, validation problems.

GRPO reads prompts (`load_inputs`, `load_validation`), supervised training reads sequences
(`load_sft_inputs`); a dry run without a tokenizer counts prompts (`load_prompt_files`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlmath.algorithms.prompt_history import PromptHistory
from rlmath.algorithms.types import Prompt
from rlmath.answers.verifier import check_tasks
from rlmath.config import length_curriculum
from rlmath.config.help import counted
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, DataConfig
from rlmath.data import loader
from rlmath.data.audit import (
    DataAudit,
    all_are_checkable,
    audit_prompts,
    audit_sequences,
    prompt_lines,
    sequence_lines,
    without_conversation,
)
from rlmath.data.chat import chat_settings
from rlmath.data.files import CHARACTERS_PER_TOKEN, folder_line
from rlmath.data.formats import read_prompts
from rlmath.data.order import PromptOrder, shares_of
from rlmath.data.prompt_curriculum import read_history
from rlmath.data.rows import UnusableRow, unusable_lines
from rlmath.data.sft_sequences import (
    SequenceReport,
    WrittenSequence,
    load_sequences,
    split_held_out,
)
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import load_tokenizer, prompt_tokens, usable_prompts
from rlmath.data.tool_chats import run_chat_settings
from rlmath.data.tool_fences import FenceFormat
from rlmath.rewards.several_rewards import MeasuredRows, is_verified, rules_of
from rlmath.workers.user_functions import form_hook, template_hook, word_or_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class PromptFiles:
    """The prompts that are left after filtering, and the order of their use."""

    prompts: list[Prompt]
    """The prompts of all files, one file after the other."""
    order: PromptOrder
    total_steps: int
    """Steps of the whole run."""
    reports: tuple[loader.FilterReport, ...]
    """Reports of the rows, file by file."""
    history: PromptHistory
    """Counts of an earlier run: how often it solved each prompt."""
    history_line: str
    """A line for the console; "" where there is no history."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines for the console: reports of the files, the order, and the history."""
        report_lines = (line for report in self.reports for line in report.lines())
        return (*report_lines, self.order.line(), *filter(None, [self.history_line]))

    @property
    def prompts_of_files(self) -> list[tuple[str, list[Prompt]]]:
        """(path, prompts) of every file, in their order."""
        ends = list(itertools.accumulate(report.kept for report in self.reports))
        starts = [0, *ends]
        return [
            (report.path, self.prompts[start:end])
            for report, start, end in zip(self.reports, starts, ends, strict=False)
        ]

    @property
    def unusable(self) -> tuple[UnusableRow, ...]:
        return tuple(row for report in self.reports for row in report.unusable)

    @property
    def dropped_share(self) -> float:
        """Share of the prompts that a filter dropped (0 to 1)."""
        return loader.dropped_share(self.reports)


@dataclass(frozen=True)
class Inputs(PromptFiles):
    """The training data of GRPO."""

    tokenizer: PreTrainedTokenizerFast
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion."""
    chat_template: str | None = None
    """The template that data.chat_template names; None where it names none."""


@dataclass(frozen=True)
class SftInputs:
    """The training data of supervised training: the sequences that are left after filtering."""

    sequences: list[WrittenSequence]
    held_out: list[WrittenSequence]
    """Sequences that are only evaluated on; empty where nothing is evaluated."""
    order: PromptOrder
    total_steps: int
    lines: tuple[str, ...]
    reports: tuple[SequenceReport, ...]
    stop_token_ids: tuple[int, ...]
    audit: DataAudit = field(default_factory=DataAudit)
    chat_template: str | None = None


# ---------------------------------------------------------------- prompts


def load_inputs(config: Config, shape: ModelShape) -> Inputs:
    """Read tokenizer and training prompts for GRPO.

    ValueError for unreadable data, too few prompts for one step, or tokens that the model does not
    know."""
    conversations = run_chat_settings(config)
    tokenizer = load_tokenizer(config.model.path, settings=conversations)
    prompt_files = load_prompt_files(config, tokenizer)
    sequences = [*(prompt.token_ids for prompt in prompt_files.prompts), (tokenizer.eos_token_id,)]
    check_vocabulary(sequences, tokenizer, shape.vocab_size, source="data.train_path")
    stops = stop_token_ids(config.model.path, tokenizer, shape.vocab_size)
    named_template = conversations.named_template(tokenizer)
    return Inputs(
        **vars(prompt_files),
        tokenizer=tokenizer,
        stop_token_ids=stops,
        chat_template=named_template,
    )


def load_prompt_files(config: Config, tokenizer: PreTrainedTokenizerFast | None) -> PromptFiles:
    """The prompts of all training files; without a tokenizer they are only counted.

    Errors: as `load_inputs`."""
    data = config.data
    paths = train_paths(config.data)
    with (
        word_or_function(form_hook(config), data.format) as form,
        word_or_function(template_hook(config), data.template) as template,
    ):
        files = [
            loader.load_prompts(
                path,
                tokenizer,
                max_prompt_tokens=data.max_prompt_tokens,
                form=form,
                template=template,
                max_unusable_share=data.max_unusable_share,
            )
            for path in paths
        ]
    prompts = loader.with_unique_names(
        [(path, prompts_of_file) for path, (prompts_of_file, _) in zip(paths, files, strict=True)]
    )
    reports = tuple(report for _, report in files)
    if is_verified(config.reward):
        check_tasks(prompt.task for prompt in prompts)
    with _explained(line for report in reports for line in report.lines()):
        order, total_steps = _prompt_steps(
            config, [len(prompts_of_file) for prompts_of_file, _ in files]
        )
    history = PromptHistory(data.history_groups)
    history_line = ""
    if data.history_path is not None:
        ids = [prompt.prompt_id for prompt in prompts]
        history, history_line = read_history(data.history_path, ids, data.history_groups)
    return PromptFiles(
        prompts,
        order,
        total_steps=total_steps,
        reports=reports,
        history=history,
        history_line=history_line,
    )


def _prompt_steps(config: Config, counts: Sequence[int]) -> tuple[PromptOrder, int]:
    """The order of use, and the steps of the run.

    ValueError where the prompts are too few."""
    order = order_of(config, counts)
    total_steps = length_curriculum.planned_steps(config, order.steps_per_epoch)
    extra = config.selection.max_extra_prompts
    spare = max(0, order.n_prompts - order.prompts_per_step)
    if config.selection.dynamic_sampling is not None and extra > spare:
        raise ValueError(
            f"selection.max_extra_prompts is {extra}; beyond a step's {order.prompts_per_step} "
            "prompts there are only "
            f"{spare}; lower it, or give more prompts"
        )
    algorithm = config.algorithm
    pretrain_steps = config.critic.pretrain_steps if algorithm.advantage == "gae" else 0
    counted = (
        f"{total_steps - pretrain_steps} steps x {algorithm.n_minibatches} minibatches x "
        f"{algorithm.epochs} epochs"
    )
    counted += " over them"
    check_critic(config, total_steps)
    check_warmup(config, most_updates(config, total_steps), counted)
    return order, total_steps


# ---------------------------------------------------------------- sequences


def load_sft_inputs(config: Config, shape: ModelShape) -> SftInputs:
    """Read tokenizer and sequences for supervised training.

    ValueError for unreadable data, too few sequences for one step, or tokens that the model does
    not know."""
    tokenizer = load_tokenizer(config.model.path, settings=chat_settings(config.data))
    data = config.data
    sft = config.sft
    fences = None
    if config.tools.format == "fence":
        fences = FenceFormat(tokenizer, config.tools.max_output_tokens)
    paths = train_paths(config.data)
    held_out_paths = [] if sft.held_out_path is None else [sft.held_out_path]
    with word_or_function(template_hook(config), data.template) as template:
        files = [
            load_sequences(
                path,
                tokenizer,
                template,
                limit=sft.max_sequence_tokens,
                max_unusable_share=data.max_unusable_share,
                fences=fences,
            )
            for path in (*paths, *held_out_paths)
        ]
    if sft.held_out_path is None:
        split = [
            split_held_out(sequences_of_file, sft.held_out_share, config.run.seed)
            for sequences_of_file, _ in files
        ]
    else:
        split = [(sequences_of_file, []) for sequences_of_file, _ in files[:-1]]
        split.append(([], files[-1][0]))
    sequences = [sequence for train, _ in split for sequence in train]
    held_out = [sequence for _, held_out_of_file in split for sequence in held_out_of_file]
    token_ids = [
        ids
        for sequence in (*sequences, *held_out)
        for ids in (sequence.prompt_ids, sequence.completion_ids)
    ]
    check_vocabulary(token_ids, tokenizer, shape.vocab_size, source="data.train_path")
    reports = tuple(report for _, report in files)
    with _explained(line for report in reports for line in report.lines()):
        order = order_of(config, [len(train) for train, _ in split[: len(paths)]])
        total_steps = length_curriculum.planned_steps(config, order.steps_per_epoch)
        check_warmup(config, total_steps, "one a step")
    evaluated = held_out if sft.eval_every_steps is not None else []
    trained_files = [(path, train) for path, (train, _) in zip(paths, split, strict=False)]
    example_lines = sequence_lines(reports[0], data, tokenizer, fences)
    audit = audit_sequences(
        trained_files,
        evaluated,
        reports,
        tokenizer=tokenizer,
        shown=example_lines,
        earlier_findings=without_conversation(reports, chat_settings(data)),
    )
    report_lines = (line for report in reports for line in report.lines())
    lines = (*report_lines, order.line(), f"Held out: {len(held_out)} sequences.")
    return SftInputs(
        sequences,
        evaluated,
        order=order,
        total_steps=total_steps,
        lines=lines,
        reports=reports,
        stop_token_ids=stop_token_ids(config.model.path, tokenizer, shape.vocab_size),
        audit=audit,
        chat_template=chat_settings(data).named_template(tokenizer),
    )


# ---------------------------------------------------------------- what both share


@contextmanager
def _explained(lines: Iterable[str]) -> Iterator[None]:
    """Add what became of the rows to a ValueError that is raised inside for too little data."""
    try:
        yield
    except ValueError as error:
        explanation = "".join(f"\n    {line.strip()}" for line in lines)
        raise ValueError(f"{error}. What became of the rows:{explanation}") from error


def train_paths(data: DataConfig) -> list[str]:
    """All files and folders of training data.

    ValueError where their weights do not match them."""
    paths = [data.train_path, *data.more_train_paths]
    loader.check_weights(paths, data.train_weights)
    return paths


def order_of(config: Config, counts: Sequence[int]) -> PromptOrder:
    """The order of use of files with these counts of prompts or sequences."""
    data = config.data
    shares = shares_of(counts, data.train_weights)
    return PromptOrder(
        sum(counts), data.prompts_per_step, config.run.seed, shuffle=data.shuffle, shares=shares
    )


def check_vocabulary(
    sequences: Iterable[Sequence[int]],
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    source: str,
) -> None:
    """ValueError for a token that the model does not know.

    `sequences` have at least one token each."""
    highest_token = max(map(max, sequences))
    if highest_token >= vocab_size:
        raise ValueError(
            f"{source}: the tokenizer gives token {highest_token} "
            f"({tokenizer.convert_ids_to_tokens(highest_token)!r}), the model has "
            f"{vocab_size} (vocab_size in config.json); use the tokenizer that belongs to the model"
        )


def most_updates(config: Config, total_steps: int) -> int:
    """Optimizer steps of the policy in a GRPO run that discards nothing."""
    pretrained = config.critic.pretrain_steps if config.algorithm.advantage == "gae" else 0
    return (total_steps - pretrained) * config.algorithm.n_minibatches * config.algorithm.epochs


def most_critic_updates(config: Config, total_steps: int) -> int:
    """Optimizer steps of the critic in a GRPO run that discards nothing."""
    return total_steps * config.algorithm.n_minibatches * critic_epochs(config)


def critic_epochs(config: Config) -> int:
    """Passes of the critic over a step's samples."""
    return config.algorithm.epochs if config.critic.epochs is None else config.critic.epochs


def check_critic(config: Config, total_steps: int) -> None:
    """ValueError for a critic whose pretraining or warm-up is as long as the run."""
    critic = config.critic
    updates = most_critic_updates(config, total_steps)
    if config.algorithm.advantage != "gae":
        return
    if critic.pretrain_steps >= total_steps:
        raise ValueError(
            f"critic.pretrain_steps is {critic.pretrain_steps}; the run has "
            f"{counted(total_steps, 'step')}, and the "
            "policy would never learn. Lower it, or make the run longer"
        )
    if updates <= critic.warmup_steps:
        raise ValueError(
            f"critic.warmup_steps is {critic.warmup_steps}; the critic has {updates} optimizer "
            "steps in this run and "
            "would never reach critic.lr; lower it"
        )


def check_warmup(config: Config, updates: int, counted: str) -> None:
    """ValueError for a warm-up that is as long as the run.

    `counted` says where its `updates` optimizer steps come from."""
    warmup = config.optimizer.warmup_steps
    if updates <= warmup:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup}; the run has {updates} optimizer steps "
            f"({counted}) and would never "
            "reach optimizer.lr; lower it"
        )


# ---------------------------------------------------------------- validation


@dataclass(frozen=True)
class ValidationFile:
    name: str
    """The file's name without its ending, as its metrics are named."""
    prompts: list[Prompt]
    too_long: int
    """Problems that leave no room for a whole completion; they count as wrong."""
    unusable: tuple[UnusableRow, ...]
    path: str = ""

    @property
    def problems(self) -> int:
        """Number of problems that accuracy is a share of."""
        return len(self.prompts) + self.too_long

    def lines(self) -> tuple[str, ...]:
        """Lines for the console: counts, and rows that cannot be used."""
        text = f"Validation {self.name}: {self.problems} problems"
        if self.too_long:
            text += f", {self.too_long} of them too long for the context, which count as wrong"
        if self.unusable:
            text += f"; {counted(len(self.unusable), 'row')} cannot be used:"
        folder = filter(None, [folder_line(self.path)])
        return (
            *folder,
            text,
            *(f"    {line}" for line in unusable_lines(self.path, self.unusable)),
        )


def load_validation(
    config: Config, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int
) -> tuple[ValidationFile, ...]:
    """The problems of `validation.paths`, if the run validates.

    Without a tokenizer problems are only counted. ValueError for a file that cannot be read or has
    no problem to sample, and for tokens that the model does not know."""
    if not length_curriculum.validates(config):
        return ()
    paths = config.validation.paths
    return tuple(
        _load_validation_file(name, path, config, tokenizer=tokenizer, vocab_size=vocab_size)
        for name, path in zip(length_curriculum.validation_names(paths), paths, strict=True)
    )


def _load_validation_file(
    name: str, path: str, config: Config, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int
) -> ValidationFile:
    """The problems of one file that leave room for a completion; errors: as `load_validation`."""
    prompts: list[Prompt] = []
    context = length_curriculum.engine_length(config)
    new_tokens = length_curriculum.validation_tokens(config)
    room = context - new_tokens - length_curriculum.unsampled_limit(config)
    most_characters = CHARACTERS_PER_TOKEN * context
    file = read_prompts(path, most_characters=most_characters)
    texts = [row.prompt for row in file.rows]
    tokens: list[list[int]] = [[] for _ in file.rows]
    if tokenizer is not None:
        word = config.validation.template or config.data.template
        with word_or_function(template_hook(config, validation=True), word) as template:
            file, prompt_texts = usable_prompts(file, template, tokenizer, most_characters)
        texts = [prompt.text for prompt in prompt_texts]
        tokens = prompt_tokens(prompt_texts, tokenizer)
    for row, text, token_ids in zip(file.rows, texts, tokens, strict=True):
        if tokenizer is None or 0 < len(token_ids) <= room:
            prompts.append(loader.as_prompt(row, text, token_ids))
    if not prompts:
        raise ValueError(
            f"validation.paths: {path} has no problem to sample: {len(file.rows)} can be used, "
            "and none of them leaves "
            f"room for {new_tokens} new tokens in a context of {context}. "
            "Take it out, lower validation.max_new_tokens, or raise data.max_prompt_tokens"
            + "".join(f"\n    {line}" for line in unusable_lines(path, file.unusable))
        )
    if is_verified(config.reward) and config.validation.scorer is None:
        check_tasks(prompt.task for prompt in prompts)
    if tokenizer is not None:
        token_ids = (prompt.token_ids for prompt in prompts)
        check_vocabulary(token_ids, tokenizer, vocab_size, source=f"validation.paths: {path}")
    return ValidationFile(
        name, prompts, len(file.rows) - len(prompts), unusable=tuple(file.unusable), path=path
    )


def measured_rows(
    config: Config, prompts: Sequence[Prompt], validation: Sequence[ValidationFile]
) -> MeasuredRows:
    """The rows whose accuracy the verifier measures, where rewards are the user's functions."""
    if is_verified(config.reward):
        return MeasuredRows()
    rules = rules_of(config.reward)
    problems = [prompt for file in validation for prompt in file.prompts]
    by_scorer = config.validation.scorer is not None
    return MeasuredRows(
        training=bool(prompts) and all_are_checkable(prompts, rules),
        validation=bool(problems) and not by_scorer and all_are_checkable(problems, rules),
    )


# ---------------------------------------------------------------- the data audit


def audit_inputs(
    config: Config,
    inputs: PromptFiles,
    validation: Sequence[ValidationFile],
    tokenizer: PreTrainedTokenizerFast | None,
) -> DataAudit:
    """The data audit of a GRPO run, with a rendered prompt: some seconds, for one rank.

    Errors: as `audit_prompts`."""
    example_lines: tuple[str, ...] = ()
    if tokenizer is not None:
        example_lines = prompt_lines(inputs.prompts[0], inputs.reports[0], config.data, tokenizer)
    problems_of_files = [(file.name, file.prompts) for file in validation]
    findings = without_conversation(inputs.reports, chat_settings(config.data))
    return audit_prompts(
        inputs.prompts_of_files,
        problems_of_files,
        config.reward,
        tokenizer=tokenizer,
        shown=example_lines,
        earlier_findings=findings,
    )
