"""Templates: what is made of a problem before the model reads it.

Each is written as its source has it:
- r1_distill: AReaL-boba's prompts for DeepSeek-R1-Distill models.
- qwen_boxed: SimpleRL's and Qwen2.5-Math's evaluation, "qwen-boxed".
- orz: Open-Reasoner-Zero, playground/zero_setting_base.py, without its beginning of sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.data.rows import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Template:
    """What stands before and behind a problem."""

    head: str
    tail: str

    def render(self, problem: str) -> str:
        return self.head + problem + self.tail

    def is_around(self, text: str) -> bool:
        """Whether a text has it already; some of AReaL's prompts have a space where others have a line's end."""
        return text.startswith(self.head) and text.endswith(self.tail.lstrip())


FIXED = {
    "r1_distill": Template("<｜User｜>\n", f"{_BOXED}<｜Assistant｜><think>\n"),
    "qwen_boxed": Template(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        f"{_BOXED}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "orz": Template(
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
        "The Assistant first thinks about the reasoning process in the mind and then provides the User with the "
        "answer. The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> "
        "</answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. "
        "User: You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And "
        "your final answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n",
        "\nAssistant: <think>",
    ),
}

_MARKS = ("<｜User｜>", "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>")
_ENDS = ("\nAssistant: <think>", "\nAnswer:\nLet's think step by step.", "\nAssistant:")


def has_template(text: str) -> bool:
    """Whether a text is a whole prompt, as far as the templates that are known tell.

    >>> has_template("Question:\\n1+1?\\nAnswer:\\nLet's think step by step.\\n"), has_template("1+1?")
    (True, False)
    """
    return any(mark in text for mark in _MARKS) or text.rstrip().endswith(_ENDS)


def render(row: PromptRow, template: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text that the model continues; `template` is a word of data.template.

    ValueError where the prompt has another template already, and for "chat" where the tokenizer has none.
    """
    if template == "raw" or (template == "auto" and row.whole):
        return row.prompt
    given = template
    if template == "auto":
        template = "chat" if tokenizer.chat_template else "qwen_boxed"
    if template in FIXED and FIXED[template].is_around(row.prompt):
        return row.prompt
    if has_template(row.prompt):
        others = '"auto" or "raw"' if row.whole else '"raw"'
        raise ValueError(
            f'data.template is "{given}", and the prompt {row.query_id[:60]!r} has a template already: it begins '
            f"{row.prompt[:60]!r}. Use data.template {others}"
        )
    return _chat(row, tokenizer) if template == "chat" else FIXED[template].render(row.prompt)


def _chat(row: PromptRow, tokenizer: PreTrainedTokenizerFast) -> str:
    """The row's own messages, or its problem with the request for a box."""
    if not tokenizer.chat_template:
        raise ValueError(
            'data.template is "chat", and the model\'s tokenizer has no chat template; use "qwen_boxed", "r1_distill", '
            '"orz" or "raw"'
        )
    messages = row.messages or (("user", row.prompt + _BOXED),)
    chat = [{"role": role, "content": content} for role, content in messages]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except (
        Exception
    ) as error:  # whatever the template's own code raises, such as for a role that it does not know
        raise ValueError(
            f"the tokenizer's chat template cannot take the prompt {row.query_id[:60]!r}: {error}; use another "
            "data.template"
        ) from error
