"""Making text that a model wrote harmless to look at."""

from __future__ import annotations

import unicodedata

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, turn the writing direction, or show nothing."""


def visible(text: str) -> str:
    """Control, format and surrogate characters written as \\x1b or \\u202e; new lines and tabs stay.

    >>> visible("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) if _is_unseen(char) else char for char in text)


def _is_unseen(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in _UNSEEN


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, most: int) -> str:
    """The text, or when it is longer than `most` characters its first and last parts with a note between."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def code_block(text: str) -> str:
    """Markdown that shows exactly this text: indented, which nothing inside can end."""
    lines = visible(text).replace("\t", "    ").split("\n")
    return "\n".join("    " + line for line in lines)
