"""Text on a terminal, whose cursor foreign text never moves.

Foreign text is that of a model, a file, or a stranger on the network. It gets there by many ways:
`print`, handlers of the libraries' loggers, argparse, Python's own tracebacks. All of them end in
`sys.stdout` or `sys.stderr`, so that is where `escape_terminal` replaces control characters.
"""

from __future__ import annotations

import os
import select
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, turn the writing direction, or show nothing."""


def visible(text: str) -> str:
    """The text with control, format and surrogate characters written as \\x1b or \\u202e.

    New lines and tabs stay.

    >>> visible("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(map(_visible_char, text))


def _visible_char(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in _UNSEEN:
        return char
    code = ord(char)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def excerpt(text: str | bytes, most: int = 200) -> str:
    """The beginning of foreign text on one line, with every character visible.

    Messages that quote foreign text use it.

    >>> excerpt(b"no\\nstatus\\x1b[2J", 13), excerpt("a" * 9, 4)
    ('no\\\\nstatus\\\\x1b[2J', 'aaaa... (9 in all)')
    """
    head = (
        text[: most + 1].decode("utf-8", "backslashreplace")
        if isinstance(text, bytes)
        else text[: most + 1]
    )
    visible_head = visible(head[:most]).replace("\n", "\\n").replace("\t", "\\t")
    return visible_head if len(text) <= most else f"{visible_head}... ({len(text)} in all)"


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Context of a program that ends quietly when the reader of its output has gone.

    `head` is such a reader. There is no traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        closed = [number for number in (1, 2) if _has_no_reader(number)]
        if not closed:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in closed:  # what is left in a buffer goes there at the interpreter's end
            os.dup2(nowhere, number)


def _has_no_reader(number: int) -> bool:
    """Whether a file descriptor is a pipe whose other end is closed."""
    poll = select.poll()
    with suppress(OSError):
        poll.register(number, select.POLLOUT)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def escape_terminal() -> None:
    """Escape what this process writes to its standard output and error from now on.

    It writes what `visible` gives of a text; every program calls this first. The carriage return
    that begins a progress bar stays."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not hasattr(stream, "rlmath_escapes"):
            _escape(stream)


def _escape(stream: TextIO) -> None:
    """Let a stream write only visible characters."""
    # Not another stream in its place: handlers and progress bars may hold this one already.
    write = stream.write

    def write_visible(text: str) -> int:
        write(visible_output(text))
        return len(text)

    stream.write = write_visible  # type: ignore[method-assign]
    stream.rlmath_escapes = True  # type: ignore[attr-defined]


def visible_output(text: str) -> str:
    """`visible`, but for the carriage return that begins a progress bar.

    >>> visible_output("\\rrollout:  50%\\r"), visible_output("\\x1b[31mred")
    ('\\rrollout:  50%\\\\x0d', '\\\\x1b[31mred')
    """
    return "\r" + visible(text[1:]) if text.startswith("\r") else visible(text)
