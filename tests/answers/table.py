"""Tables of cases that run in one test."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def check_table(function: Callable[..., Any], rows: Iterable[Sequence[Any]]) -> None:
    """Compare a function's results with a table; all differences are shown together.

    A row is the arguments, then the expected result; an exception counts as another result."""
    wrong = []
    for *arguments, expected in rows:
        try:
            outcome = function(*arguments)
        except Exception as error:
            outcome = error
        if outcome != expected:
            wrong.append(f"{arguments}: {outcome!r}, not {expected!r}")
    assert not wrong, "\n".join(wrong)


def check_refused(
    error: type[Exception], function: Callable[[Any], Any], arguments: Iterable[Any]
) -> None:
    """All arguments for which a function does not raise this exception are shown together."""
    taken = []
    for argument in arguments:
        with contextlib.suppress(error):
            taken.append(f"{argument}: {function(argument)!r}")
    assert not taken, "\n".join(taken)
