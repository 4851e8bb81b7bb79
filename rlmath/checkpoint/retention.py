"""The checkpoints that stay, and those that newer ones replace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.directory import PARTIAL, Checkpoint, complete_checkpoints, set_aside


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay."""

    keep_last: int
    """The newest ones of any kind."""
    keep_models: int | None
    """The newest ones that are kept for `save.save_freq_*`; None: all of them."""
    judged_after: int = 0
    """Steps until a step can be known to be bad; 0: at once."""
    always: frozenset[int] = frozenset()
    """Steps done in checkpoints that stay in any case."""


def set_superseded_aside(root: Path, retention: Retention, learned_step: int) -> list[Path]:
    """Rename superseded checkpoints so that they are no longer read, and return their new paths.

    The caller removes them, which takes long. Superseded are recovery points beyond the newest
    `keep_last` checkpoints, and kept ones beyond the newest `keep_models`; the newest `keep_last`
    always stay. If nothing was learned since `learned_step` steps were done, the policy may be
    broken: then the newest checkpoint from before that step, from which it learned, stays too. With
    `judged_after`, `learned_step` advances only that many steps later, and checkpoints that may
    still turn out to be before it stay (`_still_judged`). Checkpoints whose number of steps is in
    `always` stay in any case."""
    checkpoints, _ = complete_checkpoints(root)
    kept_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.kept]
    staying = [*checkpoints[: retention.keep_last], *kept_checkpoints[: retention.keep_models]]
    if checkpoints and checkpoints[0].step > learned_step:
        staying += sound_checkpoints(checkpoints, learned_step)[:1]
    if checkpoints and retention.judged_after:
        staying += _still_judged(
            [checkpoint for checkpoint in checkpoints if checkpoint.step >= learned_step],
            retention.judged_after,
        )
    staying += [checkpoint for checkpoint in checkpoints if checkpoint.step in retention.always]
    folders = {checkpoint.folder for checkpoint in staying}
    return [
        set_aside(checkpoint.folder, PARTIAL)
        for checkpoint in checkpoints
        if checkpoint.folder not in folders
    ]


def _still_judged(checkpoints: Sequence[Checkpoint], steps: int) -> Iterator[Checkpoint]:
    """At most four of `checkpoints`, which are given newest first.

    They are the newest one that is at least `steps` older than the newest of all, and then later
    ones that are half as many steps apart, beginning with the oldest."""
    newest = checkpoints[0].step if checkpoints else 0
    yield from [checkpoint for checkpoint in checkpoints if checkpoint.step <= newest - steps][:1]
    last = None
    for checkpoint in reversed(
        [checkpoint for checkpoint in checkpoints if checkpoint.step > newest - steps]
    ):
        if last is None or 2 * (checkpoint.step - last) >= steps:
            last = checkpoint.step
            yield checkpoint


def sound_checkpoints(checkpoints: Sequence[Checkpoint], learned_step: int) -> list[Checkpoint]:
    """The checkpoints from before `learned_step` (`Progress.learned_step`), in the same order.

    Their weights learned in a later step."""
    return [checkpoint for checkpoint in checkpoints if checkpoint.step < learned_step]
