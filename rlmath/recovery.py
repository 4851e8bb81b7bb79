"""Whether a run goes on from a checkpoint, and from which.

A launch script asks `find_recovery` on every rank before anything is started; with the process group there,
`choose_checkpoint` reads the candidates' files, each rank a share of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmath.checkpoint.folders import (
    CHECKPOINTS,
    SETTINGS,
    Checkpoint,
    complete_checkpoints,
    wrong_contents,
)
from rlmath.checkpoint.progress import Progress, read_progress
from rlmath.config import Config
from rlmath.config_files import load_config
from rlmath.fingerprints import data_fingerprint, model_fingerprint
from rlmath.inputs import Inputs
from rlmath.parallel.collectives import gather_objects
from rlmath.parallel.device import environment_rank
from rlmath.settings import as_yaml_word, raise_problems, setting_values

logger = logging.getLogger(__name__)

MAY_CHANGE = (
    "run.output_dir",
    "run.total_epochs",
    "run.total_steps",
    "run.device",
    "run.recover_mode",
    "run.distributed_timeout_seconds",
    "run.stop_grace_seconds",
    "run.heartbeat_timeout_seconds",
    "run.hang_timeout_seconds",
    "parallel.",
    "policy.",
    "optimizer.distributed",
    "rollout.tensor_parallel",
    "rollout.memory_share",
    "rollout.cpu_kv_cache_gib",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.chunked_prefill",
    "rollout.cuda_graphs",
    "rollout.progress_bar",
    "sync.",
    "memory.",
    "reward.timeout_seconds",
    "reward.workers",
    "reward.max_failure_share",
    "telemetry.",
    "save.",
)
"""Settings, or whole sections, that a run may go on with other values of: where and how it computes, what it keeps, how
long it is."""
BY_CONTENT = ("model.path", "data.train_path")
"""Settings that a checkpoint compares by what they hold: they may have moved."""


Chosen = tuple[Checkpoint, Progress]
"""A checkpoint, and where its run stands."""


@dataclass(frozen=True)
class Recovery:
    """Checkpoints that a run can go on from, newest first."""

    candidates: list[Chosen]
    notes: list[str]
    """What the console should say: checkpoints that are passed over."""


@dataclass(frozen=True)
class Origin:
    """What a run is made of, by fingerprint."""

    model: str
    data: str


def origin_of(config: Config, inputs: Inputs) -> Origin:
    return Origin(model_fingerprint(config.model.path), data_fingerprint(inputs.prompts))


def find_recovery(config: Config, origin: Origin) -> Recovery | None:
    """What the run goes on from; None for a start from the beginning. Reads manifests and sizes only.

    ValueError where the newest checkpoint belongs to another run (batch size, group size, data, model, ...), and, with
    run.recover_mode "resume", where there is none.
    """
    if config.run.recover_mode == "disabled":
        return None
    root = Path(config.run.output_dir) / CHECKPOINTS
    found, notes = complete_checkpoints(root)
    candidates = []
    for checkpoint in found:
        try:
            progress = read_progress(checkpoint.folder)
            then = load_config([checkpoint.folder / SETTINGS], [])
        except ValueError as error:
            notes.append(f"the checkpoint {checkpoint.folder} is damaged and is passed over: {error}")
            continue
        problems = list(_other_run(then, config, progress, origin))
        raise_problems(
            f"the run cannot go on from {checkpoint.folder}: to start anew, give another run.output_dir or "
            "run.recover_mode=disabled",
            problems,
        )
        candidates.append((checkpoint, progress))
    if not candidates and config.run.recover_mode == "resume":
        passed_over = "".join(f" {note}." for note in notes)
        raise ValueError(
            f'run.recover_mode is "resume", and {root} has no checkpoint to go on from.{passed_over} '
            'Give the run.output_dir of a run that has one, or run.recover_mode "auto".'
        )
    return Recovery(candidates, notes) if candidates or notes else None


def _other_run(then: Config, now: Config, progress: Progress, origin: Origin) -> Iterator[str]:
    yield from (change for change in refused_changes(then, now) if not change.startswith(BY_CONTENT))
    if progress.model_fingerprint != origin.model:
        yield (
            f"model.path: the model that the run started from has changed (fingerprint {progress.model_fingerprint} "
            f"there, {origin.model} of {now.model.path} now)"
        )
    if progress.data_fingerprint != origin.data:
        yield (
            f"data.train_path: the prompts have changed (fingerprint {progress.data_fingerprint} there, {origin.data} "
            f"of {now.data.train_path} now)"
        )


def refused_changes(then: Config, now: Config) -> list[str]:
    """["rollout.group_size: 8 there, 16 now", ...] of the settings that a run must keep. The
    output folder is not compared."""
    there, here = setting_values(then), setting_values(now)
    return [
        f"{key}: {as_yaml_word(there[key])} there, {as_yaml_word(here[key])} now"
        for key in here
        if there[key] != here[key] and not _may_change(key)
    ]


def _may_change(key: str) -> bool:
    return any(key.startswith(one) if one.endswith(".") else key == one for one in MAY_CHANGE)


def choose_checkpoint(recovery: Recovery | None) -> Chosen | None:
    """The newest candidate whose files are all as they were written, the same on every rank. A collective: each rank
    reads a share of the files."""
    everyone = gather_objects(recovery)
    first = everyone[0]
    if first is None:
        return None
    rank, ranks = environment_rank(), len(everyone)
    for note in first.notes:
        logger.warning("%s", note)
    for checkpoint, progress in first.candidates:
        mine = sorted(checkpoint.files)[rank::ranks]
        damage = [one for found in gather_objects(wrong_contents(checkpoint, mine)) for one in found]
        if not damage:
            return checkpoint, progress
        logger.warning("the checkpoint %s is damaged and is passed over: %s", checkpoint.folder, damage[0])
    return None
