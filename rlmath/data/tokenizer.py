"""From a problem to token ids: the templates around it, and the tokenizer of a Hugging Face model folder.

Each template is written as its source has it:
- r1_distill: AReaL-boba's prompts for DeepSeek-R1-Distill models.
- qwen_boxed: SimpleRL's and Qwen2.5-Math's evaluation, "qwen-boxed".
- orz: Open-Reasoner-Zero, playground/zero_setting_base.py, without its beginning of sequence.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.config.files import read_json_object
from rlmath.data import chat
from rlmath.data.files import MAX_LINE_BYTES
from rlmath.data.rows import PromptFile, PromptRow, UnusableRow
from rlmath.workers.user_functions import UserFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHARACTERS_AT_ONCE = 2**21
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


def rendered(
    rows: Sequence[PromptRow], template: str | UserFunction, tokenizer: PreTrainedTokenizerFast
) -> list[str]:
    """`render` of many rows; `template` may be a function of the user's. ValueError where that fails on one."""
    if not isinstance(template, UserFunction):
        return [render(row, template, tokenizer) for row in rows]
    calls = [(row.prompt, _row_for_template(row)) for row in rows]
    texts = []
    for row, result in zip(rows, template.map(calls), strict=True):
        made = f"{template.hook.setting} {template} of the prompt {row.query_id[:60]!r}"
        if result.failure is not None:
            raise ValueError(f"{made} failed: {template.reason(result)}. Correct the function")
        text = result.value
        if not isinstance(text, str):
            messages = [(one["role"], one["content"]) for one in text]
            text = _chat(messages, row, tokenizer, template.hook.setting)
        problem = _text_problem(text)
        if problem is not None:
            raise ValueError(f"{made} {problem}; needed: a text that can be tokenized. Correct the function")
        texts.append(text)
    return texts


def _row_for_template(row: PromptRow) -> dict[str, Any]:
    own = {
        "prompt": row.prompt,
        "task": row.task,
        "query_id": row.query_id,
        "solutions": list(row.solutions),
        "messages": [{"role": role, "content": content} for role, content in row.messages],
    }
    return json.loads(row.more_json) | own


def _text_problem(text: str) -> str | None:
    if not text.strip():
        return "is blank"
    if len(text) > MAX_LINE_BYTES:
        return f"has {len(text)} characters, more than {MAX_LINE_BYTES}"
    if "\0" in text or text != text.encode("utf-8", "ignore").decode("utf-8"):
        return "has a NUL character, or half a surrogate pair"
    return None


def render(row: PromptRow, template: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text that the model continues. ValueError for a second template, and for "chat" where there is none."""
    given, template = template, template_of(row, template, tokenizer)
    if template == "raw":
        return row.prompt
    if template in FIXED and FIXED[template].is_around(row.prompt):
        return row.prompt
    refuse_second_template(row, given)
    if template == "chat":
        return _chat(asked(row), row, tokenizer)
    return FIXED[template].render(row.prompt)


def refuse_second_template(row: PromptRow, given: str) -> None:
    """ValueError where the prompt has a template already, and `given` puts another around it."""
    if has_template(row.prompt):
        others = '"auto" or "raw"' if row.whole else '"raw"'
        raise ValueError(
            f'data.template is "{given}", and the prompt {row.query_id[:60]!r} has a template already: it begins '
            f"{row.prompt[:60]!r}. Use data.template {others}"
        )


def asked(row: PromptRow) -> tuple[tuple[str, str], ...]:
    """The turns that ask for an answer, as a chat template takes them."""
    return row.messages or (("user", row.prompt + _BOXED),)


def template_of(row: PromptRow, template: str | UserFunction, tokenizer: PreTrainedTokenizerFast) -> str:
    """What "auto" stands for; other words and functions are themselves. "raw": the text as it stands."""
    if template != "auto":
        return str(template)
    if row.whole:
        return "raw"
    return "chat" if tokenizer.chat_template else "qwen_boxed"


def without_template(text: str) -> str:
    """The problem of a whole prompt, where its template is one of `FIXED`."""
    for template in FIXED.values():
        if template.is_around(text):
            return text.removeprefix(template.head).removesuffix(template.tail.lstrip()).strip()
    return text


def _chat(
    messages: Sequence[tuple[str, str]],
    row: PromptRow,
    tokenizer: PreTrainedTokenizerFast,
    function_of: str | None = None,
) -> str:
    """Messages in the tokenizer's chat template; `function_of` is the setting whose function wrote them."""
    if not tokenizer.chat_template:
        given = f"{function_of} returns messages" if function_of else 'data.template is "chat"'
        raise ValueError(
            f"{given}, and the model's tokenizer has no chat template; "
            + ("return a text" if function_of else 'use "qwen_boxed", "r1_distill", "orz" or "raw"')
        )
    return chat.render(messages, tokenizer, f"the prompt {row.query_id[:60]!r}")


SPECIAL_TOKEN = "its problem would end or change the turn, as it has the tokenizer's special token"


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> re.Pattern[str]:
    """Finds the tokenizer's special tokens in a text that writes them out."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    marks = sorted(filter(None, special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def first_found(pattern: re.Pattern[str], texts: Iterable[str]) -> str | None:
    """What the pattern first finds in one of these texts."""
    found = next(filter(None, map(pattern.search, texts)), None)
    return None if found is None else found[0]


def drop_special_token_rows(
    file: PromptFile, template: str | UserFunction, tokenizer: PreTrainedTokenizerFast
) -> PromptFile:
    """The file without problems that have a special token of the tokenizer's in their text, such as "<|im_end|>": in a
    template it would end the user's turn. They are unusable. Whole prompts keep theirs."""
    rows, unusable, special = [], list(file.unusable), special_tokens(tokenizer)
    for row in file.rows:
        plain = not row.whole and template != "raw" and not has_template(row.prompt)
        texts = (row.prompt, *(content for _, content in row.messages)) if plain else ()
        found = first_found(special, texts)
        if found is None:
            rows.append(row)
        else:
            reason = f"{SPECIAL_TOKEN} {found!r}"
            unusable.append(UnusableRow(f"query_id {row.query_id[:60]!r}", reason, row.prompt[:60]))
    return replace(file, rows=rows, unusable=unusable)


# ---------------------------------------------------------------- tokenizer


def load_tokenizer(
    path: str, option: str = "model.path", settings: chat.ChatSettings | None = None
) -> PreTrainedTokenizerFast:
    """The fast tokenizer in folder `path`, never from the network or by the folder's code, with the chat template of
    `settings` (None: its own). ValueError, in which `option` names the folder, where there is none, or no fast one."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{option}: {path!r} is not a folder; it must be the folder of a Hugging Face model")
    files = ("tokenizer_config.json", "tokenizer.json", "vocab.json")
    if not any((folder / name).is_file() for name in files):
        raise ValueError(f"{option}: {path!r} has no tokenizer.json; copy the tokenizer's files there")
    is_alone = not (folder / "tokenizer_config.json").is_file()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # here, because it takes seconds

    kind = PreTrainedTokenizerFast if is_alone else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers and tokenizers raise on a broken file
        raise ValueError(f"{option}: the tokenizer in {path!r} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        name = type(tokenizer).__name__
        raise ValueError(
            f"{option}: {path!r} has a slow tokenizer ({name}); a fast one (tokenizer.json) is needed"
        )
    if tokenizer.eos_token_id is None:
        _, named = _ends_in_config(folder)
        first = named[0] if isinstance(named, list) and named else named
        if isinstance(first, int) and first in range(len(tokenizer)):
            tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(first))
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{option}: the tokenizer in {path!r} has no eos_token; set it in tokenizer_config.json"
        )
    if settings is not None:
        chat.set_template(tokenizer, settings, path)
    return tokenizer


def _ends_in_config(folder: Path) -> tuple[Path, Any]:
    """The file that counts of the two, and its "eos_token_id" as it stands; None where there is neither."""
    files = (folder / "generation_config.json", folder / "config.json")
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        return folder, None
    return file, read_json_object(file).get("eos_token_id")


def prompt_tokens(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Tokens of prompts with what the tokenizer adds; one beginning of sequence, which a template may write, too."""
    found, bos = token_ids_of(texts, tokenizer), tokenizer.bos_token_id
    for token_ids in found:
        while isinstance(bos, int) and token_ids[:2] == [bos, bos]:
            del token_ids[0]
    return found


def token_ids_of(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, special_tokens: bool = True
) -> list[list[int]]:
    """Tokens of texts, some million characters at a time: a tokenizer holds hundreds of bytes for each of them."""
    found: list[list[int]] = []
    start = 0
    while start < len(texts):
        stop, size = start + 1, len(texts[start])
        while stop < len(texts) and size + len(texts[stop]) <= _CHARACTERS_AT_ONCE:
            size += len(texts[stop])
            stop += 1
        found += tokenizer(
            texts[start:stop],
            add_special_tokens=special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        start = stop
    return found


def completion_text(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], stopped: bool) -> str:
    """The text of a completion as it is judged and shown: all that the model said, spaces as it wrote them, without
    the stop token that is its last where it `stopped` by itself. Nothing pads a completion, so the tokenizer's padding
    token is a text like others; other special tokens are, too: `<think>` is one for some."""
    said = list(token_ids)[:-1] if stopped else list(token_ids)
    return str(tokenizer.decode(said, clean_up_tokenization_spaces=False))


def unknown_token_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The token for what the tokenizer does not know, by each of its names; none where it has no such token."""
    named = getattr(tokenizer.backend_tokenizer.model, "unk_token", None)
    found = [tokenizer.unk_token_id, None if named is None else tokenizer.convert_tokens_to_ids(named)]
    return frozenset(token for token in found if isinstance(token, int))


def characters_without_token(characters: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """Characters that the tokenizer leaves out: alone, they give no token at all. Of white space only the space is
    looked at, between letters; marks and what shows nothing are not, which many tokenizers normalise."""
    given = set(characters)
    looked_at = sorted(one for one in given if unicodedata.category(one)[0] not in "CMZ")
    ids = token_ids_of([*looked_at, "a b", "ab"], tokenizer, special_tokens=False)
    lost = {one for one, found in zip(looked_at, ids, strict=False) if not found}
    return frozenset(lost | ({" "} & given if ids[-1] == ids[-2] else set()))


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's end of sequence, what ends a turn in its chat template, and what
    generation_config.json, else config.json, names. ValueError for what is no token of the model."""
    end, of_turn = tokenizer.eos_token_id, chat.chat_end(tokenizer)
    assert isinstance(end, int), end  # `load_tokenizer` refuses others
    found = {end} if of_turn is None else {end, of_turn}
    file, named = _ends_in_config(Path(path))
    also = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int and 0 <= token < vocab_size for token in also):
        raise ValueError(
            f'{file}: "eos_token_id" is {repr(named)[:80]}; needed: tokens of the model, whole numbers from 0 '
            f"to {vocab_size - 1}, or null"
        )
    return tuple(sorted(found.union(also)))
