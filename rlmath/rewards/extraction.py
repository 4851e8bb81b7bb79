"""Finds the final answer in a completion, in one pass over the text."""

from __future__ import annotations

import re
from collections import deque

_BRACES = re.compile(r"\\f?box(?:ed)?\s*\{|\\(?!\\?f?boxe?d?)[\s\S]|[{}]")
"""The start of a box, an escaped character (never a brace), or a brace."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_PHRASE = re.compile(r"\b(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?[0-9][0-9,]{0,60}(?:\.[0-9]{1,60})?(?:/[0-9]{1,60})?%?")
_PHRASE_END = re.compile(r"\.(?:\s|$)|\n|<")
_TAIL_CHARS = 2000
"""Longest answer after "the answer is" (characters)."""


def final_part(text: str) -> str:
    """The text after the thinking section: all of it without thinking tags, nothing if the section is not closed.

    >>> final_part("<think>is it 3? no</think> It is 4.")
    ' It is 4.'
    """
    _, closed, after = text.rpartition("</think>")
    opened = after.find("<think>")
    if opened >= 0:
        return after[:opened]
    return after if closed else text


def extract_answer(text: str, answer_from: str = "boxed") -> str | None:
    """The final answer, None if there is none.

    "boxed": the content of the last complete box or `<answer>` tag, whichever ends last. "phrase": without these, the
    text after the last "the answer is". "number": without that too, the last number, for base models that write no
    boxes yet.
    """
    part = final_part(text)
    answer = _boxed_or_tagged(part)
    if answer is None and answer_from in ("phrase", "number"):
        answer = _after_phrase(part)
    if answer is None and answer_from == "number":
        last = _last_match(_NUMBER, part[-20 * _TAIL_CHARS :])
        answer = last.group().rstrip(",") if last else None
    return answer


def has_box(text: str) -> bool:
    """Whether the final part has a complete box."""
    return extract_boxed(final_part(text)) is not None


def _boxed_or_tagged(part: str) -> str | None:
    boxed, box_end = _last_box(part)
    tagged = _last_tag(part) if "<answer>" in part.lower() else None
    if tagged is None or box_end > tagged[1]:
        return boxed
    inside = extract_boxed(tagged[0])
    return inside if inside is not None else tagged[0]


def extract_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...}; of nested boxes the innermost. Linear in the text.

    >>> extract_boxed("\\\\boxed{1} or \\\\boxed{\\\\frac{1}{2}} or \\\\boxed{3")
    '\\\\frac{1}{2}'
    """
    return _last_box(text)[0]


def _last_box(text: str) -> tuple[str | None, int]:
    """(content of the last box, where it ends)."""
    # Per open brace the start of its box's content, None if it opens no box.
    open_boxes: list[int | None] = []
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            open_boxes.append(None)
        elif token.endswith("{") and len(token) > 2:
            open_boxes.append(match.end())
        elif token == "}" and open_boxes:
            start = open_boxes.pop()
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
    return (None, -1) if best is None else (text[best[0] : best[1]], best[1])


def _last_tag(part: str) -> tuple[str, int] | None:
    """(content of the last complete <answer>...</answer>, where it ends)."""
    start, best = None, None
    for match in _TAG.finditer(part):
        if match.group(1):
            if start is not None:
                best = (part[start : match.start()].strip(), match.start())
            start = None
        else:
            start = match.end()
    return best


def _after_phrase(part: str) -> str | None:
    last = _last_match(_PHRASE, part)
    if last is None:
        return None
    tail = part[last.end() : last.end() + _TAIL_CHARS]
    end = _PHRASE_END.search(tail)
    answer = (tail[: end.start()] if end else tail).strip().strip("*").strip()
    return answer or None


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)
