"""The checkpoint to convert, ours or Megatron's, by any folder of it, and where the result may go.

Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint import directory
from rlmath.checkpoint.directory import INDEX
from rlmath.config.files import open_regular
from rlmath.config.help import nearest_path
from rlmath.config.run_files import CHECKPOINTS_FOLDER

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file that names the checkpoint of a folder to load: an iteration, or "release"."""
RELEASE = "release"
"""Megatron-LM's name for a checkpoint of weights alone.

From one with an iteration it also loads the optimizer."""


@dataclass(frozen=True)
class MegatronSource:
    state: Path
    """The torch_dist folder."""
    metadata_files: Path | None
    """The folder with config.json and tokenizer beside it, if there is one."""


def find_megatron(folder: Path) -> MegatronSource:
    """The checkpoint in a folder.

    It is one of ours, or the newest of a run of ours, or a torch_dist folder, or the one that
    Megatron-LM would load. ValueError if there is none, or if files of it are missing."""
    if not folder.exists():
        raise ValueError(
            f'there is no folder "{folder}".{nearest_path(folder)} Give that of a checkpoint or a '
            "run."
        )
    if (folder / INDEX).is_file():
        return _with_metadata_files(folder, folder, folder.parent)
    if (folder / directory.MANIFEST).is_file():
        damage = directory.wrong_sizes(directory.read_checkpoint(folder))
        if damage:
            raise ValueError(f"the checkpoint {folder} is damaged: {'; '.join(damage)}")
        return _with_metadata_files(folder / directory.STATE, folder)
    if (folder / TRACKER).is_file():
        return _with_metadata_files(_tracked(folder), folder)
    root = folder / CHECKPOINTS_FOLDER
    checkpoints, problems = directory.complete_checkpoints(root if root.is_dir() else folder)
    if not checkpoints:
        raise ValueError(
            f"{folder} is no checkpoint; needed: one of this program (step-...), a run's output "
            "folder, a torch_dist "
            f"folder (with {INDEX}), or a Megatron-LM folder (with {TRACKER}). "
            f"{' '.join(problems)}".rstrip()
        )
    return _with_metadata_files(checkpoints[0].state, checkpoints[0].folder)


def _tracked(folder: Path) -> Path:
    """The torch_dist folder that Megatron-LM's file names; ValueError if there is none."""
    with open_regular(folder / TRACKER) as file:
        word = file.read(40).decode("utf-8", errors="replace").strip()
    if word != RELEASE and not (word.isascii() and word.isdigit()):
        raise ValueError(f'{folder / TRACKER} says {word!r}; needed: an iteration or "{RELEASE}".')
    state = folder / (RELEASE if word == RELEASE else f"iter_{int(word):07d}")
    if not (state / INDEX).is_file():
        raise ValueError(
            f"{folder / TRACKER} names {state.name}, which is no torch_dist folder: it has no "
            f"{INDEX}. Only "
            "torch_dist checkpoints are read (Megatron-LM: --ckpt-format torch_dist)."
        )
    return state


def _with_metadata_files(state: Path, *places: Path) -> MegatronSource:
    beside = (place / directory.METADATA_FILES for place in places)
    return MegatronSource(
        state, next((path for path in beside if (path / "config.json").is_file()), None)
    )


def check_output(output: Path) -> None:
    """ValueError where `output` exists and is not an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"--output {output} is there already and is not an empty folder; name a new one."
        )
