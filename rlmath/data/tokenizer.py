"""From a problem to token ids: the templates around it, and the tokenizer of a Hugging Face model folder.

Each template is written as its source has it:
- r1_distill: AReaL-boba's prompts for DeepSeek-R1-Distill models.
- qwen_boxed: SimpleRL's and Qwen2.5-Math's evaluation, "qwen-boxed".
- orz: Open-Reasoner-Zero, playground/zero_setting_base.py, without its beginning of sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.data.files import PromptRow, read_json_object

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
    """Whether a text is a whole prompt, by the marks of the templates that are known.

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
    except Exception as error:  # whatever the template's own code raises, such as for an unknown role
        raise ValueError(
            f"the tokenizer's chat template cannot take the prompt {row.query_id[:60]!r}: {error}; use another "
            "data.template"
        ) from error


# ---------------------------------------------------------------- tokenizer


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The fast tokenizer in folder `path`; never from the network, and never code of the folder's own.

    Raises ValueError when the folder is missing, has no tokenizer, or has one that is not a fast tokenizer.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"model.path: {path!r} is not a folder; it must be the folder of a Hugging Face model"
        )
    missing = [name for name in ("tokenizer_config.json", "tokenizer.json") if not (folder / name).is_file()]
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        missing = [name for name in missing if name != "tokenizer.json"]
    if missing:
        raise ValueError(
            f"model.path: {path!r} has no {' and no '.join(missing)}; copy the tokenizer's files there"
        )
    from transformers import AutoTokenizer  # here, because it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers and tokenizers raise on a broken file
        raise ValueError(f"model.path: the tokenizer in {path!r} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise ValueError(
            f"model.path: {path!r} has a slow tokenizer ({kind}); a fast one (tokenizer.json) is needed"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.path: the tokenizer in {path!r} has no eos_token; set it in tokenizer_config.json"
        )
    return tokenizer


def prompt_tokens(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Tokens of prompts, with the special tokens that the tokenizer adds by itself, but one beginning of sequence only:
    a template may write it, too."""
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    found, bos = encoded["input_ids"], tokenizer.bos_token_id
    for token_ids in found:
        while isinstance(bos, int) and token_ids[:2] == [bos, bos]:
            del token_ids[0]
    return found


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Tokens that end a completion, as vLLM finds them: the tokenizer's end of sequence, and those that
    generation_config.json names, or config.json where there is none."""
    named = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            also = read_json_object(file).get("eos_token_id")
            named += also if isinstance(also, list) else [also]
            break
    return tuple(sorted({token for token in named if type(token) is int}))
