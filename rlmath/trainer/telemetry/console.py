"""What a run prints: one line a step, in the manner of the AReaL documents."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from rlmath.config.load import without_secrets
from rlmath.config.terminal import escape_terminal, visible

STEP_LINE_METRICS = {
    "task_reward": ".4f",
    "train/loss": ".4f",
    "held_out/loss": ".4f",
    "avg_seq_len": ".1f",
    "no_eos_ratio": ".4f",
}
"""Metrics of the step line, where the step has them, and their formats."""


_QUIET = ("vllm", "transformers", "megatron", "torch", "filelock", "urllib3", "asyncio")


def setup_logging(rank: int) -> None:
    """Time-stamped lines on stderr: everything of rank 0, warnings of the others; of libraries only errors. No text
    reaches the terminal with control characters (`escape_terminal`).

    Call it before vLLM is imported: vLLM would install handlers of its own.
    To hear the libraries, set VLLM_LOGGING_LEVEL, TORCH_CPP_LOG_LEVEL or PYTHONWARNINGS.
    """
    escape_terminal()
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    name = "" if rank == 0 else f" rank {rank}"
    handler = logging.StreamHandler()
    handler.setFormatter(
        RedactingFormatter(f"%(asctime)s.%(msecs)03d{name} %(levelname)s: %(message)s", "%Y%m%d-%H:%M:%S")
    )
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in _QUIET:
        logging.getLogger(library).setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
        if "PYTHONWARNINGS" not in os.environ:
            warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
    # Its warnings are of weights that a sync did not load.
    logging.getLogger("vllm.model_executor.model_loader.reload.inplace").setLevel(logging.WARNING)


class RedactingFormatter(logging.Formatter):
    """Of lines and tracebacks, without what settings took from the environment."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step. All counts from 1."""

    epoch: int
    total_epochs: int
    step: int
    """In its epoch."""
    steps_per_epoch: int
    global_step: int
    total_steps: int
    """Of the whole run."""
    step_seconds: float
    total_seconds: float
    """Since this program started; of a resumed run, since it was resumed."""
    steps_timed: int
    """Steps that this program made; with `total_seconds` they give the estimate."""

    @property
    def remaining_seconds(self) -> float:
        """Steps to go at the mean pace so far.

        >>> Progress(1, 1, 2, 10, 2, 10, 3.0, 8.0, 2).remaining_seconds
        32.0
        """
        return (self.total_steps - self.global_step) * self.total_seconds / self.steps_timed


def step_line(progress: Progress, metrics: Mapping[str, float]) -> str:
    """One line to read and to grep; `metrics` may hold more than is shown.

    >>> step_line(Progress(1, 2, 3, 19, 3, 38, 1.234, 5.678, 3), {"task_reward": -0.25})
    'Epoch 1/2 step 3/19 (global step 3) finishes. #End to end# execution time: *1.234*s. \
Total time consumption: 5.678s. Estimated remaining time: 66.243s. task_reward: -0.2500'
    """
    step = f"step {progress.step}/{progress.steps_per_epoch} (global step {progress.global_step})"
    shown = [f"{name}: {metrics[name]:{form}}" for name, form in STEP_LINE_METRICS.items() if name in metrics]
    return " ".join(
        [
            f"Epoch {progress.epoch}/{progress.total_epochs} {step} finishes.",
            f"#End to end# execution time: *{progress.step_seconds:.3f}*s.",
            f"Total time consumption: {progress.total_seconds:.3f}s.",
            f"Estimated remaining time: {progress.remaining_seconds:.3f}s.",
            *shown,
        ]
    )


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
