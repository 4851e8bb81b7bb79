"""What a run reads before it starts: tokenizer and prompts."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rlmath.config import Config
from rlmath.data.loader import PromptOrder, load_prompts
from rlmath.data.tokenizer import load_tokenizer
from rlmath.rewards.verify import check_tasks
from rlmath.types import Prompt


@dataclass(frozen=True)
class Inputs:
    """The prompts that are left after filtering, and the order of their use."""

    tokenizer: PreTrainedTokenizerFast
    prompts: list[Prompt]
    order: PromptOrder
    total_steps: int
    """Steps of the whole run."""
    lines: tuple[str, ...]
    """What the console should say about the data."""


def load_inputs(config: Config) -> Inputs:
    """ValueError for unreadable data, or too few prompts for one step."""
    tokenizer = load_tokenizer(config.model.path)
    prompts, report = load_prompts(config.data.train_path, tokenizer, config.data.max_prompt_tokens)
    check_tasks(prompt.task for prompt in prompts)
    order = PromptOrder(len(prompts), config.data.prompts_per_step, config.run.seed, config.data.shuffle)
    total_steps = config.run.total_epochs * order.steps_per_epoch
    if config.run.total_steps is not None:
        total_steps = min(total_steps, config.run.total_steps)
    return Inputs(tokenizer, prompts, order, total_steps, (report.line(), order.line()))
