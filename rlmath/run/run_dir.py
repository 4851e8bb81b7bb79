"""The folder that a run owns: which run may use it, and what becomes of an earlier run's files.

Every rank checks it (`check_output_folder`) before rank 0 claims it, without a barrier between:
every state that it has meanwhile (not there, empty, a scratch file, an equal config.yaml, old files
half moved) passes a late check, and config.yaml, once there, is there at every moment. A barrier
follows the claim, before other ranks write.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlmath.checkpoint.directory import nearest_folder, remove, remove_partial, set_newer_aside
from rlmath.config.files import require_regular
from rlmath.config.help import raise_problems, setting_values
from rlmath.config.load import load_config, save_config
from rlmath.config.run_files import (
    CAPTURES_FOLDER,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    EARLIER_FOLDER,
    EXIT_STATUS_FILE,
    LOCK_FILE,
    LOG_FILE,
    METRICS_FILE,
    MODELS_FOLDER,
    ROLLBACKS_FILE,
    STACKS_FOLDER,
    SUMMARY_FILE,
    TEMPORARY_FILE,
    VALIDATION_FILE,
)
from rlmath.config.schema import Config
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.run.recovery.resume import refused_changes
from rlmath.telemetry.events import take_back_events
from rlmath.telemetry.metrics_writer import keep_metrics, last_step
from rlmath.telemetry.samples import keep_samples

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 2**30
"""Free disk space below which a run does not start."""

_OWN_FILES = (
    METRICS_FILE,
    VALIDATION_FILE,
    SUMMARY_FILE,
    LOG_FILE,
    ROLLBACKS_FILE,
    EXIT_STATUS_FILE,
)
"""Files that a run reads again, or writes over."""
_NO_OBSTACLE = (LOCK_FILE, EXIT_STATUS_FILE, exit_codes.RESERVED_NAME, STACKS_FOLDER)
"""Files that a start which broke early leaves."""
_INPUTS = (
    *("model.path", "model.adapter_path", "critic.path", "teacher.path"),
    *("data.train_path", "data.more_train_paths", "validation.paths", "sft.held_out_path"),
)
_SCRATCH = re.compile(f"{TEMPORARY_FILE.pattern}|{exit_codes.SCRATCH.pattern}")


def check_output_folder(
    output_dir: str | Path, config: Config, needed_bytes: int = 0, resumes: bool = False
) -> None:
    """ValueError that lists why this run may not have the folder.

    Reads only; any rank, at any time. `needed_bytes`: what the run will leave there; `resumes`:
    from a checkpoint there, to which its settings have been compared."""
    problems = list(folder_problems(str(output_dir), config, needed_bytes, resumes=resumes))
    raise_problems(f'run.output_dir "{output_dir}"', problems)


def claim_run_folder(output_dir: str | Path, config: Config, steps_done: int | None = None) -> Path:
    """Make the folder this run's, and write config.yaml into it.

    For rank 0 alone. A resumed run gives its `steps_done`: what is there stays, but for metrics and
    samples of later steps. Else what an earlier run with an equal config left is moved to
    `<output_dir>/earlier/001` (002, ...), with a copy of its config.yaml. ValueError as
    `check_output_folder`, or if the folder cannot be written."""
    resumes = steps_done is not None
    check_output_folder(output_dir, config, resumes=resumes)
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.iterdir():
            if _SCRATCH.fullmatch(scratch.name) and scratch.is_file():
                scratch.unlink()
        remove_partial(folder / CHECKPOINTS_FOLDER)
        remove_partial(folder / MODELS_FOLDER)
        remove_partial(folder / CAPTURES_FOLDER)
        remove_partial(folder)
        if resumes:
            take_back(folder, steps_done)
        else:
            disabled = config.run.recover_mode == "disabled"
            reason = (
                'run.recover_mode is "disabled"'
                if disabled
                else f"there is no checkpoint in {CHECKPOINTS_FOLDER}/"
            )
            _move_aside(folder, reason)
        save_config(config, folder / CONFIG_FILE)
    except OSError as error:
        raise ValueError(
            f'run.output_dir "{folder}" cannot be written: {error}. Give another folder.'
        ) from error
    return folder


@contextlib.contextmanager
def sole_user(output_dir: str | Path, setting: str = "run.output_dir") -> Iterator[None]:
    """Keep other runs out of the folder, which is made if it does not exist.

    The kernel lets them in again when this process ends, however it ends. ValueError if another run
    is working in it; `setting` is the setting that names the folder. For rank 0 alone."""
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(
            f'{setting} "{folder}" cannot be written: {error}. Give another.'
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f'another run is working in {setting} "{folder}". Wait for its end, or give another '
            "folder."
        ) from error
    except OSError as error:
        logger.warning("%s has no locks (%s): nothing keeps a second run out of it", folder, error)
    try:
        yield
    finally:
        os.close(descriptor)


def folder_problems(
    output_dir: str, config: Config, needed_bytes: int, resumes: bool
) -> Iterator[str]:
    """Why this run may not have the folder, one text per reason."""
    if not output_dir.strip() or output_dir.startswith("~"):
        yield "needed: a path, written in full. Set run.output_dir, for example outputs/first."
        return
    folder = Path(output_dir)
    try:
        nearest = nearest_folder(folder)
    except ValueError as error:
        yield f"{error}. Mount or correct it, move it away, or give another run.output_dir."
        return
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        yield (
            f'"{nearest}" cannot be written into. Mend its permissions, or give another '
            "run.output_dir."
        )
        return
    free = shutil.disk_usage(nearest).free
    needed = MIN_FREE_BYTES + needed_bytes
    if free < needed:
        yield (
            f"the disk has {free / 2**30:.2f} GiB free; needed: at least {needed / 2**30:.2f} "
            "GiB, of which "
            f"{needed_bytes / 2**30:.2f} GiB for the trained model and its checkpoints. "
            "Make room, or give a run.output_dir on another disk."
        )
    yield from _input_problems(folder, config, resumes)
    for name in _OWN_FILES:
        try:
            require_regular(folder / name)
        except ValueError as error:
            yield f"{error}. Move it away."
        except OSError:
            pass  # it is not there, or the claim of the folder says what is wrong
    if nearest == folder and not resumes:
        yield from _content_problems(folder, config)


def _input_problems(folder: Path, config: Config, resumes: bool) -> Iterator[str]:
    """Inputs inside the folder, which would be moved aside when the run is repeated."""
    values = setting_values(config)
    for key in _INPUTS if resumes else (*_INPUTS, "data.history_path", "data.chat_template"):
        for path in values[key] if isinstance(values[key], list) else [values[key]]:
            if path and Path(path).resolve().is_relative_to(folder.resolve()):
                yield (
                    f'{key} "{path}" lies in it; it may hold only what the run writes. Move one '
                    "of the two."
                )


def _content_problems(folder: Path, config: Config) -> Iterator[str]:
    """Why the folder's contents cannot have been left by a run with this config."""
    config_path = folder / CONFIG_FILE
    if config_path.is_symlink() and not config_path.exists():
        yield (
            f'"{config_path}" is a link to "{os.readlink(config_path)}", where nothing can be '
            "read. Correct it."
        )
        return
    if not config_path.exists():
        obstacles = (path.name for path in folder.iterdir() if path.name not in _NO_OBSTACLE)
        names = sorted(name for name in obstacles if not _SCRATCH.fullmatch(name))
        claimed_meanwhile = CONFIG_FILE in names or config_path.exists()
        if names and not claimed_meanwhile:
            names_text = ", ".join(names[:3]) + (", ..." if names[3:] else "")
            yield (
                f"it is not empty ({names_text}) and has no {CONFIG_FILE} of a run. Give a new or "
                "empty folder."
            )
        return
    try:
        earlier = load_config([config_path], [], saved=True)
    except ValueError as error:
        yield f"its {CONFIG_FILE} cannot be compared with this run's. Give another folder. {error}"
        return
    differences = refused_changes(earlier, config)
    if differences and config.run.recover_mode != "disabled":
        yield (
            f"it belongs to a run with another config: {'; '.join(differences)}. Give a new "
            "run.output_dir, "
            f"or the same values (--config {config_path} repeats that run)."
        )


def take_back(folder: Path, steps_done: int) -> None:
    """Take a run's folder back to what it had with so many steps done.

    Later checkpoints get another name; later models, rows of metrics and validations, events and
    samples are removed. OSError if the disk refuses."""
    set_newer_aside(folder / CHECKPOINTS_FOLDER, steps_done)
    for model in (folder / MODELS_FOLDER).glob("step-" + "[0-9]" * 6):
        if int(model.name.removeprefix("step-")) > steps_done:
            remove(model)
    take_back_events(folder, steps_done, last_step(folder / METRICS_FILE))
    rows = keep_metrics(folder, steps_done)
    if rows < steps_done:
        logger.warning(
            "%s has the metrics of %d steps only, the checkpoint is that of step %d",
            folder,
            rows,
            steps_done,
        )
    keep_samples(folder, steps_done)
    keep_metrics(folder, steps_done, VALIDATION_FILE)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)


def _move_aside(folder: Path, why: str) -> None:
    """Move a run's files, but for config.yaml, to the next free `earlier/NNN`, if there are any."""
    if not (folder / CONFIG_FILE).exists():
        return
    stays = (CONFIG_FILE, EARLIER_FOLDER, LOCK_FILE, exit_codes.RESERVED_NAME)
    leftovers = sorted(path for path in folder.iterdir() if path.name not in stays)
    if not leftovers:
        return
    earlier = folder / EARLIER_FOLDER
    earlier.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdecimal()]
    aside = earlier / f"{max(numbers, default=0) + 1:03d}"
    aside.mkdir()
    shutil.copy2(folder / CONFIG_FILE, aside / CONFIG_FILE)
    names = ", ".join(path.name for path in leftovers)
    logger.warning(
        "The run starts from the beginning (%s); what an earlier one left is in %s: %s",
        why,
        aside,
        names,
    )
    for path in leftovers:
        path.rename(aside / path.name)
