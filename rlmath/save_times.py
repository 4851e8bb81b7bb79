"""When a checkpoint is due."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.config import SaveConfig

FIRST_POINT = 2
"""Steps after which a run makes its first recovery point, as AReaL does."""


@dataclass(frozen=True)
class Frequency:
    """Every so many epochs, steps or seconds, whichever comes; None: not by this."""

    epochs: int | None
    steps: int | None
    secs: float | None

    @property
    def never(self) -> bool:
        return self.epochs is None and self.steps is None and self.secs is None


def points_of(save: SaveConfig) -> Frequency:
    """How often the settings want a recovery point."""
    return Frequency(save.ckpt_freq_epochs, save.ckpt_freq_steps, save.ckpt_freq_secs)


def models_of(save: SaveConfig) -> Frequency:
    """How often they want a checkpoint to keep."""
    return Frequency(save.save_freq_epochs, save.save_freq_steps, save.save_freq_secs)


class SaveTimes:
    """Says after each step whether something is due. Seconds count from the start, and then from the last time.

    >>> times = SaveTimes(Frequency(None, 3, None), steps_per_epoch=10, now=0.0)
    >>> [step for step in range(1, 8) if times.due(step, now=float(step))]
    [3, 6]
    """

    def __init__(
        self, frequency: Frequency, steps_per_epoch: int, now: float, first: int | None = None
    ) -> None:
        """`first` is a step after which it is due in any case, unless it never is. `now` in seconds."""
        self._frequency = frequency
        self._steps_per_epoch = steps_per_epoch
        self._first = None if frequency.never else first
        self._last = now

    def due(self, step: int, now: float) -> bool:
        """Whether it is due with `step` steps done."""
        every = self._frequency
        epochs, within = divmod(step, self._steps_per_epoch)
        is_due = (
            step == self._first
            or (every.epochs is not None and within == 0 and epochs % every.epochs == 0)
            or (every.steps is not None and step % every.steps == 0)
            or (every.secs is not None and now - self._last >= every.secs)
        )
        if is_due:
            self._last = now
        return is_due
