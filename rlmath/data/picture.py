"""A prompt or a sequence as a picture.

It shows where the text comes from, where its tokens end, and what of it is learned.

      template   <|im_start|>│user│↵│
      row        1│+│1│?│
      template   <|im_end|>│↵│
      generation <|im_start|>│assistant│↵│
    * row        2│
    * end        <|im_end|>│

`picture` draws; `prompt_picture` and `sequence_picture` find what.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.config.help import counted
from rlmath.config.schema import ToolsConfig
from rlmath.config.terminal import visible
from rlmath.data.chat import Piece, generation_prompt
from rlmath.data.columns import Message, arguments_text, calls_of
from rlmath.data.rows import PromptRow, RowError
from rlmath.data.tokenizer import asked, completion_text
from rlmath.data.tool_fences import FenceFormat
from rlmath.data.tool_formats import open_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WIDTH = 76
"""Columns of a line; a dry run indents it by two."""
_TEXT_WIDTH = WIDTH - 15
_MOST_PARTS = 14
_ROWS_AT_END = 2
"""Lines of a long part that are shown of its beginning, and of its end."""
_SIGNS = {"\n": "↵", "\t": "⇥", "│": "\\u2502", "↵": "\\u21b5", "⇥": "\\u21e5"}


@dataclass(frozen=True)
class Part:
    label: str
    """The source of the text: "row"; "system" (data.system_prompt); "request" (for a box);
    "template"; "rewritten", by the template of the row; "generation" (what the template writes
    before an answer); "given" (an output in its fence, as an engine puts it behind a call); "end"
    (what ends an answer); "tokenizer"."""
    text: str
    learned: bool = False
    """Whether its tokens have weight in the loss."""


def picture(parts: Sequence[Part], ends: Collection[int]) -> tuple[str, ...]:
    """Lines of at most WIDTH columns, without control characters.

    Long parts, and many parts, are cut in the middle. `ends` are the numbers of characters of the
    whole text after which a token ends, one for each token."""
    lines: list[str] = []
    hidden = range(_MOST_PARTS // 2, len(parts) - _MOST_PARTS // 2)
    start = 0
    for number, part in enumerate(parts):
        stop = start + len(part.text)
        if number not in hidden:
            head = f"  {'*' if part.learned else ' '} {part.label:<10} "
            for row in _rows(part.text, [end - start for end in ends if start < end <= stop]):
                lines.append(head + row)
                head = " " * len(head)
        elif number == hidden.start:
            lines.append(f"    [... {counted(len(hidden), 'part')} ...]")
        start = stop
    return tuple(lines)


def _rows(text: str, ends: Collection[int]) -> list[str]:
    """A part in lines of the text's width."""
    max_chars = 2 * _ROWS_AT_END * _TEXT_WIDTH
    marked = frozenset(ends)
    if (
        len(text) <= max_chars
        and len(rows := list(_wrapped(text, 0, marked))) <= 2 * _ROWS_AT_END + 1
    ):
        return [row for _, row in rows]
    cut = len(text) - max_chars // 2
    first = list(_wrapped(text[: max_chars // 2], 0, marked))[:_ROWS_AT_END]
    last = list(_wrapped(text[cut:], cut, marked))[-_ROWS_AT_END:]
    begin = sum(size for size, _ in first)
    end = len(text) - sum(size for size, _ in last)
    tokens = sum(begin < token_end <= end for token_end in ends)
    between = f"[... {end - begin:,} characters, {tokens:,} tokens ...]"
    return [*(row for _, row in first), between, *(row for _, row in last)]


def _wrapped(text: str, start: int, ends: frozenset[int]) -> Iterator[tuple[int, str]]:
    """(characters of the text, line) of every line."""
    row = ""
    size = 0
    width = 0
    for index, char in enumerate(text, start=start + 1):
        sign = _SIGNS.get(char) or visible(char)
        sign += "│" * (index in ends)
        columns = sum(2 if unicodedata.east_asian_width(symbol) in "WF" else 1 for symbol in sign)
        if width + columns > _TEXT_WIDTH:
            yield size, row
            row = ""
            size = 0
            width = 0
        row = row + sign
        size = size + 1
        width = width + columns
    if row:
        yield size, row


# ---------------------------------------------------------------- what is drawn


def prompt_picture(
    text: str,
    row: PromptRow,
    template: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    system_prompt: str | None,
    token_ids: Sequence[int],
) -> tuple[str, ...]:
    """A rendered prompt with the tokens that it has; `template` is what `template_of` gives."""
    generation = ""
    if template == "chat":
        generation = generation_prompt(asked(row), text, tokenizer, row.tools)
    contents = _contents(text, row, template, system_prompt)
    return _drawn(_parts([Piece(text, False)], contents, generation, end=""), tokenizer, token_ids)


def sequence_picture(
    pieces: Sequence[Piece],
    row: PromptRow,
    answer: Message,
    template: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    system_prompt: str | None,
    prompt_ids: Sequence[int],
    last_token: int,
    fences: FenceFormat | None = None,
) -> tuple[str, ...]:
    """A sequence whose prompt has these tokens, and that ends with `last_token`.

    The `answer` is what is learned; with `fences` but for outputs of its calls."""
    end = str(tokenizer.convert_ids_to_tokens(last_token))
    if not pieces[-1].text.endswith(end):  # the tokens have it, the text does not
        pieces = [*pieces[:-1], Piece(pieces[-1].text + end, True)]
    before_answer = itertools.dropwhile(_is_of_answer, reversed(pieces))
    prompt = "".join(reversed([piece.text for piece in before_answer]))
    generation = ""
    if template == "chat":
        generation = generation_prompt(asked(row), prompt, tokenizer, row.tools)
    contents = [
        *_contents(prompt, row, template, system_prompt, fences),
        *_of_turn(answer, fences),
    ]
    return _drawn(_parts(pieces, contents, generation, end), tokenizer, prompt_ids)


def _is_of_answer(piece: Piece) -> bool:
    return piece.learned or piece.token_ids is not None


def call_picture(
    prompt: str, prompt_ids: Sequence[int], tools: ToolsConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, ...]:
    """A prompt with a made-up answer that calls a tool, and what is put behind the call."""
    tool_format = open_format(tokenizer, tools)
    call = tool_format.example
    turn_ids = tokenizer(call, add_special_tokens=False)["input_ids"]
    calls = tool_format.calls_in(turn_ids)
    if len(calls) != 1:
        raise ValueError(
            f'tools.format is "{tools.format}", and the tokens of {call!r} are no call: the '
            "tokenizer changes the text. Set tools.format=null, or use another model"
        )
    outputs = tool_format.outputs(turn_ids, calls, ["42\n"])
    pieces = [
        [Part("prompt", prompt)],
        [Part("sampled", call, learned=True)],
        [Part("given", completion_text(tokenizer, outputs.token_ids, stopped=False))],
        [Part("sampled", "The answer is \\boxed{42}.", learned=True)],
    ]
    return _drawn(pieces, tokenizer, prompt_ids)


def _contents(
    prompt: str,
    row: PromptRow,
    template: str,
    system_prompt: str | None,
    fences: FenceFormat | None = None,
) -> list[tuple[str, str]]:
    """(label, text) of the contents that are put into the template."""
    if template == "raw":
        return [("row", prompt)]
    if template != "chat":
        return [("row", row.prompt)]
    turns = asked(row)
    contents = [part for turn in turns for part in _of_turn(turn, fences)]
    if not row.messages:
        contents = [("row", row.prompt), ("request", turns[0]["content"].removeprefix(row.prompt))]
    if system_prompt is not None and turns[0]["role"] != "system":
        contents.insert(0, ("system", system_prompt))
    return contents


def _of_turn(message: Message, fences: FenceFormat | None) -> list[tuple[str, str]]:
    """(label, text) of the parts of a turn that a template writes, in that order."""
    texts = [message.get(key) for key in ("reasoning_content", "content")]
    contents = [text for text in texts if isinstance(text, str)]
    if fences is not None and message["role"] == "assistant":
        contents = [part for text in contents for part in _sampled_texts(text, fences)]
    for call in calls_of(message):
        arguments = call["function"]["arguments"]
        contents += dict.fromkeys(
            (arguments_text(arguments), json.dumps(arguments, ensure_ascii=False))
        )
    return [("row", text) for text in contents]


def _sampled_texts(text: str, fences: FenceFormat) -> list[str]:
    """The parts of an answer around its outputs; all of it where it has weight 0 and no outputs."""
    try:
        return [piece.text for piece in fences.pieces(text) if piece.learned]
    except RowError:
        return [text]


def _parts(
    pieces: Sequence[Piece], contents: Sequence[tuple[str, str]], generation: str, end: str
) -> list[list[Part]]:
    """The parts of every piece.

    A piece is cut where a content begins or ends, before a prompt's `generation`, and before the
    `end` of what is learned. Contents are searched from the last one on, because a template's own
    text, such as a date, comes before them."""
    labels: dict[tuple[int, int], str] = {}
    text = ""
    starts = []
    for piece in pieces:
        mark, label = (end, "end") if piece.learned else (generation, "generation")
        inner = piece.text.removesuffix(mark)
        starts.append(len(text))
        text += inner + "\0" * (len(piece.text) - len(inner))
        labels[starts[-1] + len(inner), len(text)] = label
    before = len(text)
    for label, content in reversed(contents):
        position = text.rfind(content.strip(), 0, before) if content.strip() else -1
        if position >= 0:
            labels[position, position + len(content.strip())] = label
            before = position
    parts = []
    for piece, start in zip(pieces, starts, strict=True):
        stop = start + len(piece.text)
        of_piece = {span: label for span, label in labels.items() if start <= span[0] < stop}
        if piece.token_ids is not None:
            surroundings = "given"
        elif not piece.learned or "row" in of_piece.values():
            surroundings = "template"
        else:
            surroundings = "rewritten"
        cuts = sorted({start, stop, *itertools.chain.from_iterable(of_piece)})
        parts.append(
            [
                Part(
                    of_piece.get(span, surroundings),
                    piece.text[span[0] - start : span[1] - start],
                    piece.learned,
                )
                for span in itertools.pairwise(cuts)
            ]
        )
    return parts


def _drawn(
    pieces: Sequence[Sequence[Part]], tokenizer: PreTrainedTokenizerFast, prompt_ids: Sequence[int]
) -> tuple[str, ...]:
    """The picture of pieces that are tokenized apart.

    The first piece has `prompt_ids`, with what the tokenizer put before its text."""
    shown_parts: list[Part] = []
    ends: list[int] = []
    start = 0
    for number, parts in enumerate(pieces):
        text = "".join(part.text for part in parts)
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        if number == 0:
            added = prompt_ids[: max(0, len(prompt_ids) - len(encoded["input_ids"]))]
            for name in map(str, tokenizer.convert_ids_to_tokens(list(added))):
                shown_parts.append(Part("tokenizer", name))
                start += len(name)
                ends.append(start)
        shown_parts += [part for part in parts if part.text]
        ends += [start + stop for _, stop in encoded["offset_mapping"]]
        start += len(text)
    return picture(shown_parts, ends)
