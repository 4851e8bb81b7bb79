"""Python's garbage collector and a program's start.

What a training program imports is 700,000 objects that stay. Looking for garbage among them, over and over while they
come, takes a third of the time of importing them, half a second in every full collection later, and two seconds at the
program's end. So the programs in `launch/` start with `gc.disable()`, and go on with `settle`.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Call it when what is there will stay: no collection looks at it again. From here on garbage is collected, also
    where it was not before. May be called again, when more has come."""
    gc.collect()
    gc.freeze()
    gc.enable()


def leave() -> None:
    """Call it last: what is there goes with the process, the interpreter need not look through it."""
    gc.freeze()
