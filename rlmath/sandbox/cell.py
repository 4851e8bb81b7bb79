"""One call's code, executed in a sandbox as a notebook executes a cell.

Imported before any of the model's code runs, and holds on to the functions that it needs: code that
replaces `os.write` or `random.seed` finds them replaced, this module does not.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import linecache
import random
import sys
import traceback
import types

from rlmath.sandbox.frames import Reply

CELL_NAME = "<cell {}>"
_seed_python = random.seed
_format_exception_only = traceback.format_exception_only
_settrace = sys.settrace
_setprofile = sys.setprofile
_sha256 = hashlib.sha256


class Printed(io.TextIOBase):
    """Standard output and error of a call.

    It keeps the first and the last `most_characters`, and counts those between."""

    def __init__(self, most_characters: int) -> None:
        self._most = most_characters
        self._head: list[str] = []
        self._head_room = most_characters
        self._tail = ""
        self._tail_total = 0
        self.buffer = _PrintedBytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Keep what there is room for, and count all."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        length = len(text)
        if self._head_room:
            self._head.append(text[: self._head_room])
            text = text[self._head_room :]
            self._head_room -= len(self._head[-1])
        if text:
            self._tail = (self._tail + text[-self._most :])[-self._most :]
            self._tail_total += len(text)
        return length

    def reply(self, number: int, status: str) -> Reply:
        return Reply(
            number,
            status,
            dropped_characters=self._tail_total - len(self._tail),
            text="".join(self._head) + self._tail,
        )


class _PrintedBytes(io.RawIOBase):
    """`sys.stdout.buffer`."""

    def __init__(self, printed: Printed) -> None:
        self._printed = printed

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        content = bytes(content)
        self._printed.write(content.decode("utf-8", "replace"))
        return len(content)


class Session:
    """The names of a completion's calls, which live on from one to the next."""

    def __init__(self, output_characters: int) -> None:
        self._output_characters = output_characters
        module = types.ModuleType("__main__")
        self._names = module.__dict__
        self._names["__builtins__"] = builtins
        sys.modules["__main__"] = module

    def execute(self, number: int, seed: int, code: str) -> Reply:
        """Execute a call's code; whatever it raises is text."""
        printed = Printed(self._output_characters)
        sys.stdin = io.StringIO()
        sys.stdout = printed
        sys.stderr = printed
        status = "ok"
        try:
            set_seeds(seed, number)
            value = self._evaluate(code.replace("\r\n", "\n").replace("\r", "\n"), number)
            if value is not None:
                printed.write(f"{value!r}\n")
        except SystemExit as error:
            if error.code not in (None, 0):
                status = "error"
                printed.write(error_text(error))
        except BaseException as error:
            status = status_of(error)
            printed.write(error_text(error))
        finally:
            _settrace(None)
            _setprofile(None)
        return printed.reply(number, status)

    def _evaluate(self, code: str, number: int) -> object:
        """Execute the statements of a call.

        Returns the value of the last one, where that is an expression without a semicolon."""
        name = CELL_NAME.format(number + 1)
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr) or _has_semicolon(code, last):
            exec(compile(tree, name, "exec", dont_inherit=True), self._names)
            return None
        tree.body.pop()
        expression = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        exec(compile(tree, name, "exec", dont_inherit=True), self._names)
        return eval(expression, self._names)


def _has_semicolon(code: str, statement: ast.Expr) -> bool:
    """Whether a statement is followed by a semicolon, which hides its value as in a notebook."""
    assert statement.end_lineno is not None
    lines = code.encode("utf-8", "surrogatepass").split(b"\n")
    following = lines[statement.end_lineno - 1][statement.end_col_offset :]
    return following.lstrip().startswith(b";")


def set_seeds(seed: int, number: int) -> None:
    """Seed Python's and numpy's global generators for one call of a completion.

    numpy's is seeded where numpy is loaded."""
    digest = _sha256(f"{seed} {number}".encode()).digest()
    _seed_python(int.from_bytes(digest[:8], "big"))
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(int.from_bytes(digest[8:12], "big"))


def status_of(error: BaseException) -> str:
    """The status of a call that raised this error."""
    if isinstance(error, MemoryError):
        return "memory"
    return "denied" if isinstance(error, PermissionError) else "error"


def error_text(error: BaseException) -> str:
    """The last frame within a cell, the error's type and its message."""
    try:
        frame = None
        line = 0
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename.startswith("<cell "):
                frame = step.tb_frame.f_code
                line = step.tb_lineno
            step = step.tb_next
        location = ""
        if frame is not None:
            source = linecache.getline(frame.co_filename, line).strip()
            location = (
                f'  File "{frame.co_filename}", line {line}, in {frame.co_name}\n    {source}\n'
            )
        return location + "".join(_format_exception_only(type(error), error))
    except BaseException:
        return f"{type(error).__name__}\n"
