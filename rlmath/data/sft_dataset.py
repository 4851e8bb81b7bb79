"""What a supervised run reads before it starts: sequences, and the order of their use."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rlmath.config.length_curriculum import planned_steps
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.data.dataset import train_paths
from rlmath.data.loader import PromptOrder, check_weights, shares_of
from rlmath.data.sft_sequences import (
    SequenceReport,
    WrittenSequence,
    load_sequences,
    split_held_out,
)
from rlmath.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class SftInputs:
    """The sequences that are left after filtering."""

    sequences: list[WrittenSequence]
    held_out: list[WrittenSequence]
    """Only evaluated on; empty where nothing is evaluated."""
    order: PromptOrder
    """Of `sequences`."""
    total_steps: int
    """Steps of the whole run."""
    lines: tuple[str, ...]
    """What the console should say about the data."""
    reports: tuple[SequenceReport, ...]
    """What became of the rows, file by file."""


def load_sft_inputs(config: Config, shape: ModelShape) -> SftInputs:
    """ValueError for unreadable data, too few sequences for one step, or tokens that the model does not know."""
    tokenizer = load_tokenizer(config.model.path)
    data, sft = config.data, config.sft
    how = (tokenizer, data.template, sft.max_sequence_tokens, data.max_unusable_share)
    paths = train_paths(data)
    check_weights(paths, data.train_weights)
    files = [load_sequences(path, *how) for path in paths]
    if sft.held_out_path is None:
        split = [split_held_out(found, sft.held_out_share, config.run.seed) for found, _ in files]
    else:
        files.append(load_sequences(sft.held_out_path, *how))
        split = [*((found, []) for found, _ in files[:-1]), ([], files[-1][0])]
    sequences = [one for train, _ in split for one in train]
    held_out = [one for _, held in split for one in held]
    _check_vocabulary([*sequences, *held_out], tokenizer, shape.vocab_size)
    order = _order(config, [len(train) for train, _ in split[: len(paths)]])
    total_steps = planned_steps(config, order.steps_per_epoch)
    _check_warmup(config.optimizer.warmup_steps, total_steps)
    reports = tuple(report for _, report in files)
    lines = (*(report.line() for report in reports), order.line(), f"Held out: {len(held_out)} sequences.")
    evaluated = held_out if sft.eval_every_steps is not None else []
    return SftInputs(sequences, evaluated, order, total_steps, lines, reports)


def _order(config: Config, counts: list[int]) -> PromptOrder:
    data = config.data
    shares = shares_of(counts, data.train_weights)
    return PromptOrder(sum(counts), data.prompts_per_step, config.run.seed, data.shuffle, shares)


def _check_vocabulary(
    sequences: list[WrittenSequence], tokenizer: PreTrainedTokenizerFast, vocab_size: int
) -> None:
    found = max(max(*one.prompt_ids, *one.completion_ids) for one in sequences)
    if found >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {found} ({tokenizer.convert_ids_to_tokens(found)!r}), the model has "
            f"{vocab_size} (vocab_size in config.json); use the tokenizer that belongs to the model"
        )


def _check_warmup(warmup: int, total_steps: int) -> None:
    if total_steps <= warmup:
        raise ValueError(
            f"optimizer.warmup_steps is {warmup}; the run has {total_steps} steps and would never reach optimizer.lr; "
            "lower it"
        )
