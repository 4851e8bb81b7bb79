"""What a run reads before it starts: tokenizer and prompts."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rlmath.config import Config
from rlmath.data.loader import PromptOrder, load_prompts
from rlmath.data.tokenizer import load_tokenizer, stop_token_ids
from rlmath.model_shape import ModelShape
from rlmath.rewards.verify import check_tasks
from rlmath.types import Prompt


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


def load_inputs(config: Config, shape: ModelShape) -> Inputs:
    """ValueError for unreadable data, too few prompts for one step, or tokens that the model does not know."""
    tokenizer = load_tokenizer(config.model.path)
    prompts, report = load_prompts(config.data.train_path, tokenizer, config.data.max_prompt_tokens)
    if config.reward.function is None:
        check_tasks(prompt.task for prompt in prompts)
    _check_vocabulary(prompts, tokenizer, shape.vocab_size)
    order = PromptOrder(len(prompts), config.data.prompts_per_step, config.run.seed, config.data.shuffle)
    total_steps = config.run.total_epochs * order.steps_per_epoch
    if config.run.total_steps is not None:
        total_steps = min(total_steps, config.run.total_steps)
    if config.selection.dynamic_sampling is not None:
        _check_extra_prompts(config.selection.max_extra_prompts, order)
    _check_warmup(config, total_steps)
    stops = stop_token_ids(config.model.path, tokenizer)
    return Inputs(tokenizer, prompts, order, stops, total_steps, (report.line(), order.line()))


def _check_vocabulary(prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    largest = max(prompts, key=lambda prompt: max(prompt.token_ids))
    found = max(*largest.token_ids, tokenizer.eos_token_id)
    if found >= vocab_size:
        raise ValueError(
            f'the tokenizer gives token {found} (prompt "{largest.prompt_id}" or its eos_token), the model has '
            f"{vocab_size} (vocab_size in config.json); use the tokenizer that belongs to the model"
        )


def _check_extra_prompts(extra: int, order: PromptOrder) -> None:
    spare = order.n_prompts - order.prompts_per_step
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
