"""Checkpoints on disk: their files, which of them are complete and which are whole.

`retention` says which of them stay.

<run.output_dir>/checkpoints/
  step-000020/            complete: renamed to this when all of it was written and checked
    manifest.json         size and SHA-256 of every other file; written last
    progress.json         how far the run is (`Progress`), for people and programs
    config.yaml           the settings of the run
    flight.safetensors    unfinished groups, where rollouts are partial
    routes-00000.safetensors
                          experts of their completions that rank 0 holds, where engines' are replayed
    critic_config.json    config.json of the critic, where there is one
    prompt_history.jsonl  how often prompts were solved, and what a curriculum draws next; of GRPO
    state/                Megatron's torch_dist form: model, optimizer, random states
    hf/                   config.json and tokenizer files of the model
  step-000040.partial/    being written, or left by a run that was killed; never read, removed by the next run
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlmath.config.files import read_json, require_regular

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SETTINGS = "config.yaml"
PROGRESS = "progress.json"
STATE = "state"
INDEX = ".metadata"
"""The index of a torch_dist folder."""
METADATA_FILES = "hf"
CRITIC = "critic"
REFERENCE = "reference"
"""Name of the reference; checkpoints have it unless it is the model that the run started from."""
CRITIC_CONFIG = "critic_config.json"
"""The critic's config.json, beside the state."""
PARTIAL = ".partial"
DAMAGED = ".damaged"
NEEDED = (PROGRESS, SETTINGS, f"{STATE}/{INDEX}")
"""Files that every checkpoint has."""
FORMAT = 1
"""Version of this layout, in every manifest."""
MAX_MANIFEST_BYTES = 2**26
"""A larger manifest is refused; a file takes some 150 bytes of it."""
_NAME = re.compile(r"step-(\d{6,})")
_DAMAGE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EIO,
    errno.EBADMSG,
    errno.EUCLEAN,
    errno.ENODATA,
)


class OutOfReachError(ValueError):
    """A checkpoint cannot be read now, and may be whole."""


@dataclass(frozen=True)
class FileEntry:
    """A file, as the manifest lists it."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint by its name and manifest; its files may have been damaged since."""

    folder: Path
    step: int
    """Steps done."""
    kept: bool
    """Made for `save.save_freq_*`; the others are recovery points, which newer ones replace."""
    files: dict[str, FileEntry]
    """Files by their path relative to the folder."""

    @property
    def state(self) -> Path:
        return self.folder / STATE


def partial_of(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint while it is written: `root`/step-000020.partial."""
    return root / f"step-{step:06d}{PARTIAL}"


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there.

    ValueError where that cannot be known or is no folder: a link to nothing or to itself, a file,
    no permission, a disk that does not answer."""
    for nearest in (path, *path.parents):
        try:
            if stat.S_ISDIR(nearest.stat().st_mode):
                return nearest
        except (FileNotFoundError, NotADirectoryError) as error:
            if not nearest.is_symlink():
                continue
            text = (
                f'a link to "{os.readlink(nearest)}", where nothing is (a disk that is not '
                "mounted?)"
            )
            raise ValueError(f'"{nearest}" is not a folder but {text}') from error
        except OSError as error:
            raise ValueError(f'"{nearest}" cannot be looked at ({error.strerror})') from error
        raise ValueError(f'"{nearest}" is not a folder')
    return path  # not reached: "/" and "." are folders


def complete_checkpoints(root: Path) -> tuple[list[Checkpoint], list[str]]:
    """All checkpoints under `root`, newest first, and a sentence on each that is damaged.

    Reads manifests and sizes, not contents. ValueError if `root`, or anything with a checkpoint's
    name, is out of reach (`nearest_folder`)."""
    checkpoints = []
    problems = []
    for step, folder in sorted(_named(root), reverse=True):
        try:
            checkpoint = read_checkpoint(folder)
            damage = wrong_sizes(checkpoint)
            if damage:
                raise ValueError("; ".join(damage))
            if checkpoint.step != step:
                raise ValueError(f"its manifest is that of step {checkpoint.step}")
            checkpoints.append(checkpoint)
        except OutOfReachError:
            raise
        except ValueError as error:
            problems.append(f"the checkpoint {folder} is damaged and is skipped: {error}")
    return checkpoints, problems


def _named(root: Path) -> Iterator[tuple[int, Path]]:
    """Step and folder of everything with a checkpoint's name under `root`.

    ValueError if it is out of reach, which does not mean absent."""
    if nearest_folder(root) != root:
        return
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise ValueError(f'"{root}" cannot be read ({error.strerror})') from error
    for name in names:
        match = _NAME.fullmatch(name)
        if match and nearest_folder(root / name) == root / name:
            yield int(match[1]), root / name


def means_loss(error: OSError) -> bool:
    """Whether a file is lost.

    Other errors (no permission, a disk that does not answer) may be gone tomorrow."""
    return error.errno in _DAMAGE


def raise_if_out_of_reach(path: Path, error: Exception) -> None:
    """OutOfReachError where the error does not mean that the file is lost."""
    if isinstance(error, OSError) and not means_loss(error):
        raise OutOfReachError(f'"{path}" cannot be read now ({error.strerror})') from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; ValueError if its manifest is missing or cannot be used."""
    path = folder / MANIFEST
    try:
        values = read_json(path, MAX_MANIFEST_BYTES)
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}; this program reads {FORMAT}")
        files = {
            name: FileEntry(_whole(record["size"]), str(record["sha256"]))
            for name, record in values["files"].items()
        }
        checkpoint = Checkpoint(folder, _whole(values["step"]), bool(values["kept"]), files)
        missing_names = [name for name in NEEDED if name not in files]
        if missing_names:
            raise ValueError(f"it does not name {', '.join(missing_names)}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise_if_out_of_reach(path, error)
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    outside = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise ValueError(f"{path} names files outside of its folder ({outside[0]!r})")
    return checkpoint


def _whole(value: Any) -> int:
    """JSON has numbers of any size and kind."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is not a size or a step")
    return value


def wrong_sizes(checkpoint: Checkpoint) -> list[str]:
    """A sentence for every file that is missing or has another size than the manifest says."""
    problems = []
    for name, entry in checkpoint.files.items():
        try:
            size = require_regular(checkpoint.folder / name)
        except ValueError as error:
            problems.append(str(error))
            continue
        except OSError as error:
            raise_if_out_of_reach(checkpoint.folder / name, error)
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if size != entry.size:
            problems.append(f"{name} has {size} bytes, the manifest says {entry.size}")
    return problems


def wrong_contents(
    checkpoint: Checkpoint, names: Iterable[str], on_block: Callable[[], None] = lambda: None
) -> list[str]:
    """A sentence for every named file whose contents have changed.

    Reads all; OSError where one cannot be read."""
    return [
        f"{name} has other contents than were written (SHA-256 differs)"
        for name in names
        if file_entry(checkpoint.folder / name, on_block) != checkpoint.files[name]
    ]


def file_entry(path: Path, on_block: Callable[[], None] = lambda: None) -> FileEntry:
    """Size and checksum of a file, as it is read; `on_block` is called for every few MiB."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
            on_block()
            size += len(block)
    return FileEntry(size, digest.hexdigest())


def content_entry(content: bytes) -> FileEntry:
    """Size and checksum of a file that has this content."""
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def open_partial(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of a step into."""
    partial = partial_of(root, step)
    remove(partial)
    (partial / STATE).mkdir(parents=True)
    (partial / METADATA_FILES).mkdir()
    return partial


def finish_partial(partial: Path, step: int, kept: bool, known: dict[str, FileEntry]) -> Checkpoint:
    """Write the manifest and rename the folder to its final name.

    `known` are the entries that were computed when the files were written; all other files are
    read now. OSError on a disk error, ValueError if a file has changed."""
    files = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        name = path.relative_to(partial).as_posix()
        files[name] = known.get(name) or file_entry(path)
    checkpoint = Checkpoint(partial, step, kept, files)
    problems = [
        *wrong_sizes(checkpoint),
        *(f"{name} is not there" for name in known if name not in files),
    ]
    if problems:
        raise ValueError("; ".join(problems))
    entries = {name: asdict(entry) for name, entry in files.items()}
    values = {"format": FORMAT, "step": step, "kept": kept, "files": entries}
    (partial / MANIFEST).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    for path in (*partial.rglob("*"), partial):
        if path.relative_to(partial).as_posix() not in known:
            flush(path)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    if os.path.lexists(final):
        aside = set_aside(final, DAMAGED)
        logger.warning(
            "%s was there before and is %s now: this run saves the step anew", final, aside.name
        )
    partial.rename(final)
    flush(final.parent)
    return Checkpoint(final, step, kept, files)


def flush(path: Path) -> None:
    """Sync a file or a folder to disk; OSError where that fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error_text(error: Exception, path: Path) -> str:
    """Why a file was not written, and how full its disk is.

    The RuntimeError of torch's zip format does not mention a full disk."""
    text = f"{path} was not written: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    with contextlib.suppress(OSError):
        disk = os.statvfs(path.parent)
        gib = disk.f_bavail * disk.f_frsize / 2**30
        text += f"; its disk has {gib:.3f} GiB and {disk.f_favail} files (inodes) left"
    return text


def set_aside(folder: Path, ending: str) -> Path:
    """Rename a folder to a name that is no checkpoint's, and return the new path.

    This is one step: an incomplete checkpoint never has the name of a complete one. A folder that
    was set aside before under that name is replaced if it is incomplete, and stays if it is
    damaged."""
    aside = folder.with_name(folder.name + ending)
    if ending == DAMAGED:
        numbered = (
            folder.with_name(f"{folder.name}{ending}-{number}") for number in itertools.count(2)
        )
        aside = next(
            path for path in (aside, *itertools.islice(numbered, 999)) if not os.path.lexists(path)
        )
    else:
        remove(aside)
    return folder.rename(aside)


def set_newer_aside(root: Path, step: int) -> None:
    """Rename checkpoints newer than the resumed step to `step-NNNNNN.damaged`.

    They must not count among the newest."""
    for newer_step, folder in list(_named(root)):
        if newer_step > step:
            aside = set_aside(folder, DAMAGED)
            text = (
                "%s is newer than step %d, from which the run resumes, and is %s now; remove "
                "it when you have looked"
            )
            logger.warning(f"{text} at it", folder, step, aside.name)


def remove(path: Path) -> None:
    """Remove a folder, file or link, if it is there.

    No error where it cannot be: what takes its place says why."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_partial(root: Path) -> None:
    """Remove the incomplete checkpoints of runs that were killed."""
    for path in root.glob(f"*{PARTIAL}"):
        logger.info("Removing %s, which an earlier run left unfinished", path)
        remove(path)


# ---------------------------------------------------------------- progress.json


@dataclass(frozen=True)
class Progress:
    """The state of a run that is not a tensor.

    The rest (prompts, draws, seeds) follows from `run.seed`, the step and the rollbacks, but for
    what `prompt_history.jsonl` and `flight.safetensors` have."""

    step: int
    """Steps done; the next one has this number, counted from 0."""
    epoch: int
    """Epoch of the next step, from 0."""
    position: int
    """Prompts of that epoch's order that were used."""
    updates: int
    """Optimizer steps done: the weights' version, and the learning-rate schedule's position."""
    syncs: int
    """Weight syncs that the steps done needed: one each, none where there are no engines."""
    layout: str
    """Ranks and layout it was made with, in words."""
    world_size: int
    optimizer_tensors: tuple[str, ...]
    """Names of the optimizer's tensors beside each parameter."""
    random_states: tuple[str, ...]
    """Names of the random generators whose states are there, one row for each rank."""
    model_fingerprint: str
    data_fingerprint: str
    """Fingerprint of the prompts, in order, as they were tokenized."""
    versions: dict[str, str]
    """Versions of the libraries that matter."""
    discarded_steps: int = 0
    """Steps up to this one, in a row, of which every minibatch was discarded."""
    learned_step: int = 0
    """Steps done when a minibatch was last learned from."""
    reward_fingerprint: str = ""
    """Fingerprint of the file of `reward.function`; "" where there is none."""
    hooks_fingerprint: str = ""
    """Fingerprint of the files of functions that select groups or give advantages; "" if none."""
    cpu_sampler: int = 1
    """`CPU_SAMPLER_VERSION` of its time."""
    models: tuple[str, ...] = ()
    """Names of the models that it has beside the policy."""
    critic_updates: int = 0
    loss_scale: tuple[float, ...] = ()
    """The policy's loss scale, and updates since it last changed; () if losses are not scaled.

    It is `Learner.loss_scale_state`."""
    critic_loss_scale: tuple[float, ...] = ()
    good_step: int = 2**62
    """Steps done at the end of the best rewards, where the run looks at them
    (`algorithm.rollback_reward_drop`)."""
    rewards: tuple[float, ...] = ()
    """The mean reward of every step, where the run looks at them."""
    rollback_steps: tuple[int, ...] = ()
    """Steps done in the checkpoints that the run went back to, in the order of its rollbacks."""
    rollback_draw_steps: tuple[int, ...] = ()
    """The first step of other prompts and seeds, by rollback."""
    entropy: tuple[float, ...] = ()
    """`EntropyControl`'s two numbers, where `algorithm.entropy_target` has one."""
    adapter_fingerprint: str = ""
    """Fingerprint of the adapters that the run started from, `model.adapter_path`; "" without."""
    model_formats: dict[str, str] = field(default_factory=dict)
    """Number formats of the model that the run started from; empty if they are not known.

    Tensors with a format of their own are there by name; that of all others is under ""."""

    def has_model(self, name: str) -> bool:
        """Whether the checkpoint has the weights of a model; "" is the policy."""
        return name == "" or name in self.models

    @property
    def sound_before(self) -> int:
        """The step before which checkpoints are good.

        Their weights learned afterwards, and the best rewards came no earlier."""
        return min(self.learned_step, self.good_step + 1)


def write_progress(folder: Path, progress: Progress) -> None:
    (folder / PROGRESS).write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")


def read_progress(folder: Path) -> Progress:
    """Read a checkpoint's progress; ValueError if the file cannot be used.

    The manifest's checksum says that it is as it was written."""
    path = folder / PROGRESS
    try:
        values = read_json(path)
        values = {
            "learned_step": values["step"]
        } | values  # older versions did not write all fields
        known_values = {
            progress_field.name: values[progress_field.name]
            for progress_field in fields(Progress)
            if progress_field.name in values
        }
        return Progress(
            **{
                name: tuple(field_value) if isinstance(field_value, list) else field_value
                for name, field_value in known_values.items()
            }
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
