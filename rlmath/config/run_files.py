"""Names in a run's folder, and how a file is written so that no reader sees half of it."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

CONFIG_FILE = "config.yaml"
"""All settings of the run."""
METRICS_FILE = "metrics.jsonl"
"""A row for every step."""
SWITCH_PHASES = ("offload", "wake", "wake_kv_cache", "sleep", "restore")
"""Timers of a step that make up the switch of memory between training and sampling.

They are `seconds/...` of its row."""
VALIDATION_FILE = "validation.jsonl"
"""A row for every validation."""
SUMMARY_FILE = "summary.json"
EXIT_STATUS_FILE = "exit_status.json"
"""How the last start of the run ended."""
ROLLBACKS_FILE = "rollbacks.json"
EVENTS_FILE = "events.jsonl"
"""A row for every start, checkpoint, warning and the like."""
LOG_FILE = "run.log"
"""Log of the console."""
REPORT_FILE = "report.html"
COMPARED_FILE = "compared.html"
DATA_REPORT_FILE = "data_report.json"
UNUSABLE_ROWS_FILE = "unusable_rows.jsonl"
LOCK_FILE = ".lock"

CHECKPOINTS_FOLDER = "checkpoints"
SAMPLES_FOLDER = "samples"
PROFILE_FOLDER = "profile"
CAPTURES_FOLDER = "captures"
"""Captured inputs of the updates of steps."""
STACKS_FOLDER = "stacks"
"""Stacks of the threads of ranks that hung."""
TENSORBOARD_FOLDER = "tensorboard"
EARLIER_FOLDER = "earlier"
"""Folders of earlier runs with equal settings: 001, 002, ..."""

EXPORT_FOLDER = "hf_model"
"""The model of the last step, in Hugging Face form."""
BEST_FOLDER = "best_model"
"""The model with the best validation so far, in the same form."""
MODELS_FOLDER = "models"
"""Models of kept checkpoints, and of stages, in the same form."""
ADAPTER_FOLDER = "adapter"
"""Folder of the adapters alone, as PEFT has them, in each of these folders of a run with LoRA."""
ADAPTER_CONFIG = "adapter_config.json"

TEMPORARY_FILE = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
"""The name of a file that `write_whole` has not finished."""


def stage_folder(output_dir: str | Path, number: int) -> Path:
    """Folder of the model of a stage, which is counted from 0: models/stage-1 of the first."""
    return Path(output_dir) / MODELS_FOLDER / f"stage-{number + 1}"


def adapter_alone(folder: Path) -> Path | None:
    """The adapters in a folder, or in an export with `save.merged=false`.

    None where it has the model, or none."""
    return None if (folder / "config.json").is_file() else adapter_in(folder)


def adapter_in(folder: Path) -> Path | None:
    """The adapters in a folder or an export, with or without the model; None where it has none."""
    return next(
        (
            candidate
            for candidate in (folder, folder / ADAPTER_FOLDER)
            if (candidate / ADAPTER_CONFIG).is_file()
        ),
        None,
    )


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file's content (text in UTF-8) in one step.

    A reader sees the old file or the whole new one, which is on the disk when this returns. Makes
    the folder. OSError where the disk refuses; then nothing is left over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with scratch.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what `write_whole` of a killed process has left in a folder, if it is there."""
    for path in folder.glob(".*.tmp"):
        if TEMPORARY_FILE.fullmatch(path.name) and path.is_file():
            path.unlink()
