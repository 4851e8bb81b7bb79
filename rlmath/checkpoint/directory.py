"""Checkpoints on disk: their files, which are complete, which are whole, which are superseded.

<run.output_dir>/checkpoints/
  step-000020/            complete: renamed to this when all of it was written and checked
    manifest.json         size and SHA-256 of every other file; written last
    progress.json         how far the run is (`Progress`), for people and programs
    config.yaml           the settings of the run
    flight.safetensors    unfinished groups, where rollouts are partial
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
"""Name of the reference, which a checkpoint has where it is not the model that the run started
from."""
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
    """A complete checkpoint, from its name and its manifest; its files may have been damaged
    since."""

    folder: Path
    step: int
    """Steps done."""
    kept: bool
    """Made for `save.save_freq_*`; the others are recovery points, which newer ones replace."""
    files: dict[str, FileEntry]
    """By path relative to the folder."""

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
    """All under `root`, newest first, and a sentence on each whose manifest cannot be used.

    Reads manifests and sizes, not contents. ValueError where `root`, or what has a checkpoint's
    name, cannot be looked at (`nearest_folder`)."""
    found, problems = [], []
    for step, folder in sorted(_named(root), reverse=True):
        try:
            checkpoint = read_checkpoint(folder)
            damage = wrong_sizes(checkpoint)
            if damage:
                raise ValueError("; ".join(damage))
            if checkpoint.step != step:
                raise ValueError(f"its manifest is that of step {checkpoint.step}")
            found.append(checkpoint)
        except OutOfReachError:
            raise
        except ValueError as error:
            problems.append(f"the checkpoint {folder} is damaged and is skipped: {error}")
    return found, problems


def _named(root: Path) -> Iterator[tuple[int, Path]]:
    """By step.

    ValueError where that cannot be known: what cannot be looked at is not absent."""
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
    """The checkpoint in a folder; ValueError where it has no manifest, or one that cannot be
    used."""
    path = folder / MANIFEST
    try:
        values = read_json(path, MAX_MANIFEST_BYTES)
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}; this program reads {FORMAT}")
        files = {
            name: FileEntry(_whole(x["size"]), str(x["sha256"]))
            for name, x in values["files"].items()
        }
        checkpoint = Checkpoint(folder, _whole(values["step"]), bool(values["kept"]), files)
        absent = [name for name in NEEDED if name not in files]
        if absent:
            raise ValueError(f"it does not name {', '.join(absent)}")
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
    wrong = []
    for name, entry in checkpoint.files.items():
        try:
            size = require_regular(checkpoint.folder / name)
        except ValueError as error:
            wrong.append(str(error))
            continue
        except OSError as error:
            raise_if_out_of_reach(checkpoint.folder / name, error)
            wrong.append(f"{name} cannot be read ({error.strerror})")
            continue
        if size != entry.size:
            wrong.append(f"{name} has {size} bytes, the manifest says {entry.size}")
    return wrong


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
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**22):
            digest.update(block)
            on_block()
            size += len(block)
    return FileEntry(size, digest.hexdigest())


def open_partial(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of a step into."""
    partial = partial_of(root, step)
    remove(partial)
    (partial / STATE).mkdir(parents=True)
    (partial / METADATA_FILES).mkdir()
    return partial


def finish_partial(partial: Path, step: int, kept: bool, known: dict[str, FileEntry]) -> Checkpoint:
    """Write the manifest and rename the folder to its final name.

    `known` are the entries that were computed where the files were written; the others are read
    now. OSError on a disk error, ValueError where a file has changed."""
    files = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        name = path.relative_to(partial).as_posix()
        files[name] = known.get(name) or file_entry(path)
    checkpoint = Checkpoint(partial, step, kept, files)
    lost = [
        *wrong_sizes(checkpoint),
        *(f"{name} is not there" for name in known if name not in files),
    ]
    if lost:
        raise ValueError("; ".join(lost))
    entries = {name: asdict(entry) for name, entry in files.items()}
    values = {"format": FORMAT, "step": step, "kept": kept, "files": entries}
    (partial / MANIFEST).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    for path in (*partial.rglob("*"), partial):
        if path.relative_to(partial).as_posix() not in known:
            _flush(path)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    if os.path.lexists(final):
        other = set_aside(final, DAMAGED)
        logger.warning(
            "%s was there before and is %s now: this run saves the step anew", final, other.name
        )
    partial.rename(final)
    _flush(final.parent)
    return Checkpoint(final, step, kept, files)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error_text(error: Exception, path: Path) -> str:
    """Why a file was not written, and how full its disk is: torch's RuntimeError of its zip format
    does not say it."""
    told = f"{path} was not written: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    with contextlib.suppress(OSError):
        disk = os.statvfs(path.parent)
        gib = disk.f_bavail * disk.f_frsize / 2**30
        told += f"; its disk has {gib:.3f} GiB and {disk.f_favail} files (inodes) left"
    return told


def set_aside(folder: Path, ending: str) -> Path:
    """Rename a folder to a name that is no checkpoint's, in one step: an incomplete one never has a
    complete name. What was set aside before under that name is replaced if it is incomplete, and
    stays if it is damaged."""
    other = folder.with_name(folder.name + ending)
    if ending == DAMAGED:
        more = (
            folder.with_name(f"{folder.name}{ending}-{number}") for number in itertools.count(2)
        )
        other = next(
            one for one in (other, *itertools.islice(more, 999)) if not os.path.lexists(one)
        )
    else:
        remove(other)
    return folder.rename(other)


def set_superseded_aside(
    root: Path,
    keep_last: int,
    keep_models: int | None,
    learned_step: int,
    judged_after: int = 0,
    always: Collection[int] = (),
) -> list[Path]:
    """Rename superseded checkpoints so that they are no longer read; the caller removes them, which
    takes long. Superseded are recovery points beyond the newest `keep_last` checkpoints, and kept
    ones beyond the newest `keep_models`; the newest `keep_last` always stay. Where nothing was
    learned since `learned_step` steps were done, the policy may be broken: then the newest one from
    before that step, from which it learned, stays too. With `judged_after`, `learned_step` advances
    only so many steps later: what may still come before it stays (`_still_judged`). Those with
    `always` of so many steps done stay in any case."""
    found, _ = complete_checkpoints(root)
    kept = [one for one in found if one.kept]
    stays = {one.folder for one in found[:keep_last]}
    if found and found[0].step > learned_step:
        stays |= {one.folder for one in sound_checkpoints(found, learned_step)[:1]}
    if judged_after and found:
        later = [one for one in found if one.step >= learned_step]
        stays |= {one.folder for one in _still_judged(later, judged_after)}
    stays |= {one.folder for one in (kept if keep_models is None else kept[:keep_models])}
    stays |= {one.folder for one in found if one.step in always}
    return [set_aside(one.folder, PARTIAL) for one in found if one.folder not in stays]


def _still_judged(found: Sequence[Checkpoint], steps: int) -> Iterator[Checkpoint]:
    """Some of the checkpoints, newest first: the newest one that is `steps` older than the newest,
    and of the later ones some that are half as many steps apart, beginning with the oldest: four at
    most."""
    newest = found[0].step if found else 0
    yield from [one for one in found if one.step <= newest - steps][:1]
    last = None
    for one in reversed([one for one in found if one.step > newest - steps]):
        if last is None or 2 * (one.step - last) >= steps:
            last = one.step
            yield one


def sound_checkpoints(found: Sequence[Checkpoint], learned_step: int) -> list[Checkpoint]:
    """The checkpoints whose weights learned in a later step, in the same order
    (`Progress.learned_step`)."""
    return [one for one in found if one.step < learned_step]


def set_newer_aside(root: Path, step: int) -> None:
    """Rename what is newer than the resumed step to `step-NNNNNN.damaged`: it must not count among
    the newest."""
    for newer, folder in list(_named(root)):
        if newer > step:
            other = set_aside(folder, DAMAGED)
            text = (
                "%s is newer than step %d, from which the run resumes, and is %s now; remove "
                "it when you have looked"
            )
            logger.warning(f"{text} at it", folder, step, other.name)


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
    """Optimizer steps done: the version of the weights, and where the learning-rate schedule
    stands."""
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
    """Fingerprint of the files of functions that select groups and give advantages; "" where there
    is none."""
    cpu_sampler: int = 1
    """`CPU_SAMPLER_VERSION` of its time."""
    models: tuple[str, ...] = ()
    """Names of the models that it has beside the policy."""
    critic_updates: int = 0
    loss_scale: tuple[float, ...] = ()
    """The policy's, and updates since it last changed (`Learner.loss_scale_state`); () where losses
    are not scaled."""
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
    """Of the adapters that the run started from, `model.adapter_path`; "" without."""
    model_formats: dict[str, str] = field(default_factory=dict)
    """Number formats of the model that the run started from: of tensors by name, of all others
    under ""; empty where they are not known."""

    def has_model(self, name: str) -> bool:
        """Whether the checkpoint has the weights of a model; "" is the policy."""
        return name == "" or name in self.models

    @property
    def sound_before(self) -> int:
        """Checkpoints before this step are good: weights learned afterwards, and the best rewards
        came no earlier."""
        return min(self.learned_step, self.good_step + 1)


def write_progress(folder: Path, progress: Progress) -> None:
    (folder / PROGRESS).write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")


def read_progress(folder: Path) -> Progress:
    """ValueError where the file cannot be used.

    The manifest's checksum says that it is as it was written."""
    path = folder / PROGRESS
    try:
        values = read_json(path)
        values = {
            "learned_step": values["step"]
        } | values  # older versions did not write all fields
        known = {
            entry.name: values[entry.name] for entry in fields(Progress) if entry.name in values
        }
        return Progress(
            **{name: tuple(x) if isinstance(x, list) else x for name, x in known.items()}
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
