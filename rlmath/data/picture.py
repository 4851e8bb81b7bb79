"""A prompt or a sequence as a picture: where its text comes from, where its tokens end, and what of it is learned.

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
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.config.help import counted
from rlmath.config.terminal import visible
from rlmath.data.chat import Piece, generation_prompt
from rlmath.data.rows import PromptRow
from rlmath.data.tokenizer import asked

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
    """Where it is from: "row"; "system" (data.system_prompt); "request" (for a box); "template"; "rewritten", by the
    template of the row; "generation" (what the template writes before an answer); "end" (what ends it); "tokenizer"."""
    text: str
    learned: bool = False
    """Whether its tokens have weight in the loss."""


def picture(parts: Sequence[Part], ends: Collection[int]) -> tuple[str, ...]:
    """Lines of at most WIDTH columns, without control characters; long parts, and many, are cut in the middle. `ends`
    are the numbers of characters of the whole text behind which a token ends, one for each token."""
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
    most = 2 * _ROWS_AT_END * _TEXT_WIDTH
    marked = frozenset(ends)
    if len(text) <= most and len(rows := list(_wrapped(text, 0, marked))) <= 2 * _ROWS_AT_END + 1:
        return [row for _, row in rows]
    cut = len(text) - most // 2
    first = list(_wrapped(text[: most // 2], 0, marked))[:_ROWS_AT_END]
    last = list(_wrapped(text[cut:], cut, marked))[-_ROWS_AT_END:]
    begin, end = sum(size for size, _ in first), len(text) - sum(size for size, _ in last)
    tokens = sum(begin < one <= end for one in ends)
    between = f"[... {end - begin:,} characters, {tokens:,} tokens ...]"
    return [*(row for _, row in first), between, *(row for _, row in last)]


def _wrapped(text: str, start: int, ends: frozenset[int]) -> Iterator[tuple[int, str]]:
    """(characters of the text, line) of every line."""
    row, size, width = "", 0, 0
    for index, char in enumerate(text, start=start + 1):
        shown = _SIGNS.get(char) or visible(char)
        shown += "│" * (index in ends)
        columns = sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in shown)
        if width + columns > _TEXT_WIDTH:
            yield size, row
            row, size, width = "", 0, 0
        row, size, width = row + shown, size + 1, width + columns
    if row:
        yield size, row


# ---------------------------------------------------------------- what is drawn


def prompt_picture(
    text: str, row: PromptRow, template: str, tokenizer: PreTrainedTokenizerFast, system_prompt: str | None
) -> tuple[str, ...]:
    """A rendered prompt; `template` is what `template_of` gives."""
    generation = generation_prompt(asked(row), text, tokenizer) if template == "chat" else ""
    contents = _contents(text, row, template, system_prompt)
    return _drawn(_parts([Piece(text, False)], contents, generation, ""), tokenizer)


def sequence_picture(
    pieces: Sequence[Piece],
    row: PromptRow,
    template: str,
    tokenizer: PreTrainedTokenizerFast,
    system_prompt: str | None,
    last_token: int,
) -> tuple[str, ...]:
    """A sequence that ends with `last_token`; the row's solution is what is learned."""
    end = str(tokenizer.convert_ids_to_tokens(last_token))
    if not pieces[-1].text.endswith(end):  # the tokens have it, the text does not
        pieces = [*pieces[:-1], Piece(pieces[-1].text + end, True)]
    prompt = "".join(one.text for one in pieces[:-1])
    generation = generation_prompt(asked(row), prompt, tokenizer) if template == "chat" else ""
    contents = [*_contents(prompt, row, template, system_prompt), ("row", row.solutions[0])]
    return _drawn(_parts(pieces, contents, generation, end), tokenizer)


def _contents(prompt: str, row: PromptRow, template: str, system_prompt: str | None) -> list[tuple[str, str]]:
    """(label, text) of what is put into the template."""
    if template == "raw":
        return [("row", prompt)]
    if template != "chat":
        return [("row", row.prompt)]
    turns = asked(row)
    contents = [("row", content) for _, content in turns]
    if not row.messages:
        contents = [("row", row.prompt), ("request", turns[0][1].removeprefix(row.prompt))]
    if system_prompt is not None and turns[0][0] != "system":
        contents.insert(0, ("system", system_prompt))
    return contents


def _parts(
    pieces: Sequence[Piece], contents: Sequence[tuple[str, str]], generation: str, end: str
) -> list[list[Part]]:
    """The parts of every piece: cut where a content begins or ends, before a prompt's `generation`, and before the
    `end` of what is learned. Contents are looked for from the last one on: a template's own text, such as a date, comes
    before them."""
    labels: dict[tuple[int, int], str] = {}
    text, starts = "", []
    for piece in pieces:
        mark, label = (end, "end") if piece.learned else (generation, "generation")
        inner = piece.text.removesuffix(mark)
        starts.append(len(text))
        text += inner + "\0" * (len(piece.text) - len(inner))
        labels[starts[-1] + len(inner), len(text)] = label
    before = len(text)
    for label, content in reversed(contents):
        found = text.rfind(content.strip(), 0, before) if content.strip() else -1
        if found >= 0:
            labels[found, found + len(content.strip())] = label
            before = found
    parts = []
    for piece, start in zip(pieces, starts, strict=True):
        stop = start + len(piece.text)
        of_piece = {span: label for span, label in labels.items() if start <= span[0] < stop}
        other = "template" if not piece.learned or "row" in of_piece.values() else "rewritten"
        cuts = sorted({start, stop, *itertools.chain(*of_piece)})
        parts.append(
            [
                Part(of_piece.get(span, other), piece.text[span[0] - start : span[1] - start], piece.learned)
                for span in itertools.pairwise(cuts)
            ]
        )
    return parts


def _drawn(pieces: Sequence[Sequence[Part]], tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The picture of pieces that are tokenized apart, with what the tokenizer adds to the first one by itself."""
    shown: list[Part] = []
    ends: list[int] = []
    for number, parts in enumerate(pieces):
        before, stops, after = _tokens("".join(one.text for one in parts), tokenizer, number == 0)
        for added in ([Part("tokenizer", before)], parts, [Part("tokenizer", after)]):
            start = sum(len(one.text) for one in shown)
            shown += [one for one in added if one.text]
            if added is parts:
                ends += [start + stop for stop in stops]
            elif added[0].text:
                ends.append(start + len(added[0].text))
    return picture(shown, ends)


def _tokens(
    text: str, tokenizer: PreTrainedTokenizerFast, special_tokens: bool
) -> tuple[str, list[int], str]:
    """What is added before the text (of two beginnings of sequence one), where its tokens end, what is added behind."""
    found = tokenizer(
        text,
        add_special_tokens=special_tokens,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    names = list(map(str, tokenizer.convert_ids_to_tokens(found["input_ids"])))
    own = [number for number, is_added in enumerate(found["special_tokens_mask"]) if not is_added]
    first, last = (own[0], own[-1] + 1) if own else (len(names), len(names))
    stops = [stop for _, stop in found["offset_mapping"][first:last]]
    before = [] if names[:2] == [tokenizer.bos_token] * 2 else names[:first]
    return "".join(before), stops, "".join(names[last:])
