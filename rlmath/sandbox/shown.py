"""The text that a model is shown of a call: the same for the same code, on any machine."""

from __future__ import annotations

import re

ESCAPE_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_]?)")
"""Sequences that colour text or move a terminal's cursor."""
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
ADDRESSES = re.compile(r"\bat 0x[0-9A-Fa-f]{6,16}\b")
"""Addresses, such as that of `<object object at 0x7f3c2a1b4e50>`."""
LIBRARY_FOLDERS = re.compile(
    r"(?<![\w/])/[^\s:\"']*?/(?:site-packages|dist-packages|python3\.\d+)/"
)
"""Folders of libraries in warnings and tracebacks: where they are installed is the machine's
affair."""


def cleaned(text: str) -> str:
    """Text without escape codes, control characters, addresses and folders of libraries.

    >>> cleaned("\\x1b[31mred\\x1b[0m <f at 0x7f3c2a1b4e50>\\r\\n")
    'red <f at 0x...>\\n'
    """
    text = ESCAPE_CODES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = CONTROL_CHARACTERS.sub("", text)
    return LIBRARY_FOLDERS.sub("", ADDRESSES.sub("at 0x...", text))


def shown_text(text: str, dropped_characters: int, most_characters: int) -> tuple[str, int]:
    """(what is shown, characters left out) of a sandbox's output, whose beginning and end it keeps.

    `text` has the first and the last `most_characters` where characters between them were dropped.

    >>> shown_text("abcdefgh", 0, 4)
    ('ab\\n[... 4 characters left out ...]\\ngh', 4)
    """
    if dropped_characters:
        head = cleaned(text[:most_characters])
        tail = cleaned(text[most_characters:])
    else:
        head = cleaned(text)
        if len(head) <= most_characters:
            return head, 0
        middle = len(head) // 2
        head, tail = head[:middle], head[middle:]
    half = most_characters // 2
    left_out = dropped_characters + max(0, len(head) - half) + max(0, len(tail) - half)
    return f"{head[:half]}\n[... {left_out:,} characters left out ...]\n{tail[-half:]}", left_out
