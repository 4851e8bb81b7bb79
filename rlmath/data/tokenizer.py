"""Templates around a problem, and the tokenizer of a Hugging Face model folder.

Each template is written as its source has it:
- r1_distill: AReaL-boba's prompts for DeepSeek-R1-Distill models.
- qwen_boxed: SimpleRL's and Qwen2.5-Math's evaluation, "qwen-boxed".
- orz: Open-Reasoner-Zero, playground/zero_setting_base.py, without its beginning of sequence.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.data import chat
from rlmath.data.columns import Message, for_template, messages_of, text_problem
from rlmath.data.files import MAX_LINE_BYTES
from rlmath.data.rows import PromptFile, PromptRow, RowError, UnusableRow
from rlmath.data.stop_tokens import ends_in_config
from rlmath.data.turns import check_rendered, check_turns, marks_of
from rlmath.workers.user_functions import UserFunction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHARACTERS_AT_ONCE = 2**21
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Template:
    """The texts before and after a problem."""

    head: str
    tail: str

    def render(self, problem: str) -> str:
        return self.head + problem + self.tail

    def is_around(self, text: str) -> bool:
        """Whether a text has the template already.

        Some of AReaL's prompts have a space where others have a line's end."""
        return text.startswith(self.head) and text.endswith(self.tail.lstrip())


FIXED = {
    "r1_distill": Template("<｜User｜>\n", f"{_BOXED}<｜Assistant｜><think>\n"),
    "qwen_boxed": Template(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        f"{_BOXED}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "orz": Template(
        "A conversation between User and Assistant. The User asks a question, and the Assistant "
        "solves it. "
        "The Assistant first thinks about the reasoning process in the mind and then provides the "
        "User with the "
        "answer. The reasoning process is enclosed within <think> </think> and answer is enclosed "
        "within <answer> "
        "</answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> "
        "answer here </answer>. "
        "User: You must put your answer inside <answer> </answer> tags, i.e., <answer> answer "
        "here </answer>. And "
        "your final answer will be extracted automatically by the \\boxed{} tag.\nThis is the "
        "problem:\n",
        "\nAssistant: <think>",
    ),
}

_MARKS = (
    "<｜User｜>",
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "[INST]",
    "<|user|>",
)
_ENDS = ("\nAssistant: <think>", "\nAnswer:\nLet's think step by step.", "\nAssistant:")


def has_template(text: str) -> bool:
    """Whether a text is a whole prompt, by the marks of the templates that are known.

    >>> has_template("Question:\\n1+1?\\nAnswer:\\nLet's think step by step.\\n"), has_template("1+1?")
    (True, False)
    """
    return any(mark in text for mark in _MARKS) or text.rstrip().endswith(_ENDS)


@dataclass(frozen=True)
class PromptText:
    """A text that the model continues."""

    text: str
    is_chat: bool = False
    """Whether the tokenizer's chat template wrote it, with all special tokens that it shall
    have."""


def usable_prompts(
    file: PromptFile,
    template: str | UserFunction,
    tokenizer: PreTrainedTokenizerFast,
    most_characters: int = MAX_LINE_BYTES,
    limit: int | None = None,
) -> tuple[PromptFile, list[PromptText]]:
    """The file without rows that the template cannot take, and the prompts of its rows.

    The rows that it cannot take are unusable; with a `limit` no more than so many usable rows are
    read. Errors: as `rendered`."""
    rows: list[PromptRow] = []
    prompts: list[PromptText] = []
    unusable = list(file.unusable)
    for row, prompt in zip(
        file.rows, rendered(file.rows, template, tokenizer, most_characters), strict=True
    ):
        if isinstance(prompt, RowError):
            unusable.append(
                UnusableRow(f"query_id {row.query_id[:60]!r}", str(prompt), row.prompt[:60])
            )
        else:
            rows.append(row)
            prompts.append(prompt)
        if len(rows) == limit:
            break
    return replace(file, rows=rows, unusable=unusable), prompts


def rendered(
    rows: Sequence[PromptRow],
    template: str | UserFunction,
    tokenizer: PreTrainedTokenizerFast,
    most_characters: int = MAX_LINE_BYTES,
) -> Iterator[PromptText | RowError]:
    """The prompt of every row, or the reason why it has none of at most `most_characters`.

    `template` may be a function of the user's. ValueError where that fails on a row, and for a chat
    template that is none or takes too long or too much memory."""
    written_prompts: Iterable[str | list[dict] | None] = itertools.repeat(None)
    if isinstance(template, UserFunction):
        written_prompts = _made_by(template, rows)
    for row, written in zip(rows, written_prompts, strict=False):
        try:
            prompt = _prompt_of(row, template, tokenizer, written)
            if len(prompt.text) > most_characters:
                raise RowError(
                    f"in its template it has {len(prompt.text)} characters, more than "
                    f"{most_characters}; it is not "
                    "tokenized"
                )
            yield prompt
        except RowError as error:
            yield error


def _prompt_of(
    row: PromptRow,
    template: str | UserFunction,
    tokenizer: PreTrainedTokenizerFast,
    written: str | list[dict] | None,
) -> PromptText:
    """The prompt of one row; `written` is what a function of the user's made of it.

    RowError where it has none."""
    if not isinstance(template, UserFunction):
        return prompt_text(row, template, tokenizer)
    check_row(row, template, tokenizer)
    if isinstance(written, str):
        return PromptText(written)
    setting = template.hook.setting
    messages = messages_of(written, f"what {setting} returned")
    check_turns(messages, row.tools, marks_of(tokenizer, None))
    return PromptText(_chat(messages, row, tokenizer, function_of=setting), is_chat=True)


def _made_by(template: UserFunction, rows: Sequence[PromptRow]) -> Iterator[str | list[dict]]:
    """The texts or messages that a function of the user's makes of the rows.

    ValueError where it fails on a row."""
    calls = ((row.prompt, _row_for_template(row)) for row in rows)
    for row, outcome in zip(rows, template.map(calls), strict=True):
        prompt_name = f"{template.hook.setting} {template} of the prompt {row.query_id[:60]!r}"
        if outcome.failure is not None:
            raise ValueError(
                f"{prompt_name} failed: {template.reason(outcome)}. Correct the function"
            )
        problem = text_problem(outcome.value) if isinstance(outcome.value, str) else None
        if problem is not None:
            raise ValueError(
                f"{prompt_name} {problem}; needed: a text that can be tokenized. "
                "Correct the function"
            )
        yield outcome.value


def _row_for_template(row: PromptRow) -> dict[str, Any]:
    """The row as a function of the user's gets it, with its further columns."""
    row_columns = {
        "prompt": row.prompt,
        "task": row.task,
        "query_id": row.query_id,
        "solutions": list(row.solutions),
        "messages": for_template(row.messages),
    }
    return json.loads(row.more_json) | row_columns


def check_row(
    row: PromptRow,
    template: str | UserFunction,
    tokenizer: PreTrainedTokenizerFast,
    answer: Message | None = None,
) -> None:
    """RowError for a row whose texts would make turns, or that has a template already.

    Its texts are those of the prompt and of an `answer` that is to be learned. Texts that stay as
    they stand may have any marks."""
    word = template_of(row, template, tokenizer)
    if word == "raw" or _is_around(word, row):
        return
    if isinstance(template, UserFunction):
        if row.whole or has_template(row.prompt):
            return  # the function knows what it is given
        messages = (*row.messages, chat.user(row.prompt))
        written = None
    else:
        if not row.messages:
            _refuse_second_template(row, template)
        messages = asked(row) if word == "chat" else (chat.user(row.prompt),)
        written = FIXED[word].head + FIXED[word].tail if word in FIXED else None
    answers = () if answer is None else (answer,)
    check_turns((*messages, *answers), row.tools, marks_of(tokenizer, written))
    if row.messages and not isinstance(template, UserFunction):
        _refuse_second_template(row, template)


def _is_around(word: str, row: PromptRow) -> bool:
    return word in FIXED and FIXED[word].is_around(row.prompt)


def prompt_text(row: PromptRow, template: str, tokenizer: PreTrainedTokenizerFast) -> PromptText:
    """The prompt of a row in a template by its word.

    RowError for a row that cannot be in it (`check_row`, `chat.render`); ValueError for "chat"
    where there is none."""
    word = template_of(row, template, tokenizer)
    if word == "raw" or _is_around(word, row):
        return PromptText(row.prompt)
    check_row(row, template, tokenizer)
    if word == "chat":
        return PromptText(_chat(asked(row), row, tokenizer), is_chat=True)
    return PromptText(FIXED[word].render(row.prompt))


def _refuse_second_template(row: PromptRow, template: str) -> None:
    """RowError where the prompt has a template already, and `template` puts another around it."""
    if has_template(row.prompt):
        change = 'Use data.template "auto" or "raw"' if row.whole else 'Use data.template "raw"'
        if row.messages:
            change = "Take it out of the message"
        raise RowError(
            f'data.template is "{template}", and the prompt {row.query_id[:60]!r} has a template '
            "already: it begins "
            f"{row.prompt[:60]!r}. {change}"
        )


def asked(row: PromptRow) -> tuple[Message, ...]:
    """The turns that ask for an answer, as a chat template takes them."""
    return row.messages or (chat.user(row.prompt + _BOXED),)


def template_of(
    row: PromptRow, template: str | UserFunction, tokenizer: PreTrainedTokenizerFast
) -> str:
    """The template that "auto" stands for; other words and functions are themselves.

    "raw": the text as it stands."""
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
    messages: Sequence[Message],
    row: PromptRow,
    tokenizer: PreTrainedTokenizerFast,
    function_of: str | None = None,
) -> str:
    """The text of messages in the tokenizer's chat template.

    `function_of` is the setting whose function wrote them."""
    if not tokenizer.chat_template:
        cause = f"{function_of} returns messages" if function_of else 'data.template is "chat"'
        raise ValueError(
            f"{cause}, and the model's tokenizer has no chat template; "
            + ("return a text" if function_of else 'use "qwen_boxed", "r1_distill", "orz" or "raw"')
        )
    name = f"the prompt {row.query_id[:60]!r}"
    text = chat.render(messages, tokenizer, name, tools=row.tools)
    check_rendered(text, messages, row.tools, tokenizer=tokenizer, is_prompt=True)
    return text


# ---------------------------------------------------------------- tokenizer


def load_tokenizer(
    path: str, option: str = "model.path", settings: chat.ChatSettings | None = None
) -> PreTrainedTokenizerFast:
    """The fast tokenizer in folder `path`, never from the network or by the folder's code.

    It has the chat template of `settings` (None: its own). ValueError, in which `option` names the
    folder, where there is no tokenizer, or no fast one."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"{option}: {path!r} is not a folder; it must be the folder of a Hugging Face model"
        )
    files = ("tokenizer_config.json", "tokenizer.json", "vocab.json")
    if not any((folder / name).is_file() for name in files):
        raise ValueError(
            f"{option}: {path!r} has no tokenizer.json; copy the tokenizer's files there"
        )
    is_alone = not (folder / "tokenizer_config.json").is_file()
    # Imported here, because it takes seconds.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if is_alone else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers and tokenizers raise on a broken file
        raise ValueError(f"{option}: the tokenizer in {path!r} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        name = type(tokenizer).__name__
        raise ValueError(
            f"{option}: {path!r} has a slow tokenizer ({name}); a fast one (tokenizer.json) is "
            "needed"
        )
    if tokenizer.eos_token_id is None:
        _, configured = ends_in_config(folder)
        first = configured[0] if isinstance(configured, list) and configured else configured
        if isinstance(first, int) and first in range(len(tokenizer)):
            tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(first))
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{option}: the tokenizer in {path!r} has no eos_token; set it in tokenizer_config.json"
        )
    if settings is not None:
        chat.set_template(tokenizer, settings, path)
    return tokenizer


def prompt_tokens(
    prompts: Sequence[PromptText], tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """Tokens of prompts.

    A chat has the tokens of its text alone, as in transformers' `apply_chat_template` and in
    servers. Any other prompt begins as the tokenizer begins a text, once. An end that a tokenizer
    puts after a text is never there."""
    token_ids = token_ids_of([prompt.text for prompt in prompts], tokenizer)
    beginning = _beginning(tokenizer)
    for number, prompt in enumerate(prompts):
        if not prompt.is_chat and token_ids[number][: len(beginning)] != beginning:
            token_ids[number] = beginning + token_ids[number]
    return token_ids


def _beginning(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that the tokenizer puts before a text by itself, such as a beginning of sequence."""
    for text in ("1", "a", "one", str(tokenizer.eos_token or "")):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer(text)["input_ids"]
        for start in range(len(whole) - len(plain) + 1 if plain else 0):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
    return []


def token_ids_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Tokens of texts, without any that the tokenizer adds.

    Some million characters are tokenized at a time: a tokenizer takes hundreds of bytes of memory
    for each of them."""
    token_ids: list[list[int]] = []
    start = 0
    while start < len(texts):
        stop = start + 1
        size = len(texts[start])
        while stop < len(texts) and size + len(texts[stop]) <= _CHARACTERS_AT_ONCE:
            size += len(texts[stop])
            stop += 1
        token_ids += tokenizer(
            list(texts[start:stop]),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        start = stop
    return token_ids


def completion_text(
    tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], stopped: bool
) -> str:
    """The text of a completion as it is judged and shown: all tokens that the model sampled.

    Spaces are as the model wrote them. The stop token, the last one where the completion `stopped`
    by itself, is left out. Nothing pads a completion, so the tokenizer's padding token is a text
    like others; so are other special tokens: `<think>` is one for some tokenizers."""
    text_ids = list(token_ids)[:-1] if stopped else list(token_ids)
    return str(tokenizer.decode(text_ids, clean_up_tokenization_spaces=False))


def unknown_token_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The token for unknown text, by each of its names; none where there is no such token."""
    unknown_token = getattr(tokenizer.backend_tokenizer.model, "unk_token", None)
    candidates = [
        tokenizer.unk_token_id,
        None if unknown_token is None else tokenizer.convert_tokens_to_ids(unknown_token),
    ]
    return frozenset(token for token in candidates if isinstance(token, int))


def characters_without_token(
    characters: Iterable[str], tokenizer: PreTrainedTokenizerFast
) -> frozenset[str]:
    """Characters that the tokenizer leaves out: alone, they give no token at all.

    The only white space that is examined is the space, between letters. Marks and characters that
    show nothing are not examined: many tokenizers normalise them."""
    distinct = set(characters)
    probed = sorted(
        character for character in distinct if unicodedata.category(character)[0] not in "CMZ"
    )
    ids = token_ids_of([*probed, "a b", "ab"], tokenizer)
    lost = {
        character
        for character, character_ids in zip(probed, ids, strict=False)
        if not character_ids
    }
    return frozenset(lost | ({" "} & distinct if ids[-1] == ids[-2] else set()))
