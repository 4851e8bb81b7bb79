"""Inputs that a run names by ids of the Hugging Face hub, fetched into every node's cache.

    rank 0               downloads every id at the commit that the run in the folder has, else at the hub's
    all ranks meet       and have rank 0's commits
    a node's first rank  downloads them where they are not, or not whole, in the cache that it sees; the others wait
    all ranks meet

Where a single rank runs it does all of it by itself. Settings without ids come back as they are,
and no rank waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.checkpoint.save_schedule import exports_merged
from rlmath.config import hub
from rlmath.config.help import raise_problems, schema_problems
from rlmath.config.hub import FetchedConfig, HubFailedError, HubId
from rlmath.config.load import load_config
from rlmath.config.run_files import ADAPTER_FOLDER, CONFIG_FILE, EXPORT_FOLDER
from rlmath.config.schema import Config
from rlmath.distributed.ranks import RankReport, RendezvousResult, environment_rank

if TYPE_CHECKING:
    from rlmath.distributed.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


class SharedMistakeError(ValueError):
    """A mistake that all ranks know of already."""


def fetch_inputs(config: Config, rendezvous: Rendezvous | None, weights: bool = True) -> Config:
    """The settings with ids of the hub replaced by paths in this node's cache.

    Without `weights` models are fetched without theirs. All ranks call it; `rendezvous` is None if
    there is one rank. ValueError for a mistake, SharedMistakeError if another rank reports one,
    HubFailedError if the hub or the network fails, MissingRanksError if ranks are missing or the
    hub has failed another rank."""
    ids = hub.hub_ids(config)
    if not ids:
        return config
    raise_problems(
        "this run", schema_problems(config)
    )  # they are found before hours of downloading
    recorded = recorded_ids(config) if environment_rank() == 0 else ()
    pins = fetch_ids(
        ids,
        config.run.hub_timeout_seconds,
        config.run.start_timeout_seconds,
        rendezvous=rendezvous,
        recorded=recorded,
        weights=weights,
    )
    return hub.with_places(config, pins)


def fetch_ids(
    ids: Collection[HubId],
    seconds: float,
    start_seconds: float,
    *,
    rendezvous: Rendezvous | None,
    recorded: Collection[HubId] = (),
    weights: bool = True,
) -> dict[HubId, HubId]:
    """Every id with its commit, which is in this node's cache.

    Errors and arguments: as `fetch_inputs`; `recorded` is rank 0's."""
    logger.info("Looking for what is named by ids of the Hugging Face hub ...")
    if rendezvous is None:
        return hub.fetch(ids, seconds, recorded, weights=weights)
    rank_info = rendezvous.rank_info
    limit = seconds + start_seconds

    def commits_of(wanted: Collection[HubId]) -> dict[str, str]:
        pins = hub.fetch(wanted, seconds, recorded, weights=weights)
        return {str(hub_id): pinned.commit for hub_id, pinned in pins.items()}

    commits = _sync(
        rendezvous,
        "hub commits",
        limit,
        work=lambda: commits_of(ids if rank_info.rank == 0 else ()),
    )
    if unknown := {*map(str, ids)} - {*commits}:
        raise ValueError(
            f"the settings of this rank name {min(unknown)}, those of rank 0 do not. Give all the "
            "same."
        )
    pins = {hub_id: replace(hub_id, commit=commits[str(hub_id)]) for hub_id in ids}
    leads = rank_info.is_node_leader and rank_info.rank != 0
    _sync(rendezvous, "hub files", limit, work=lambda: commits_of(pins.values() if leads else ()))
    return pins


def _sync(
    rendezvous: Rendezvous, name: str, seconds: float, work: Callable[[], Mapping[str, str]]
) -> Mapping[str, str]:
    """The values that `work` returns on rank 0; if it fails on any rank, all ranks raise.

    A collective."""
    rank_info = rendezvous.rank_info
    values = {}
    report = RankReport(rank_info.host, rank_info.node)
    try:
        values = work()
    except (ValueError, HubFailedError) as error:
        report = replace(report, problem=str(error), may_pass=isinstance(error, HubFailedError))
    try:
        return rendezvous.sync(
            name, report, seconds, check=lambda reports: RendezvousResult(values=values)
        )
    except ValueError as error:
        raise SharedMistakeError(str(error)) from None


def recorded_ids(config: Config) -> list[HubId]:
    """The hub ids of the run in the folder, with their commits, from its config.yaml.

    Empty if the run starts from the beginning."""
    if config.run.recover_mode == "disabled":
        return []
    with suppress(OSError, ValueError):
        return hub.hub_ids(load_config([Path(config.run.output_dir) / CONFIG_FILE], [], saved=True))
    return []


def download_lines(config: Config) -> Iterator[str]:
    """Lines about what a start would download, for a dry run, which needs no weights."""
    for pinned in dict.fromkeys(config.ids.values()) if isinstance(config, FetchedConfig) else ():
        line = f"Hub: {pinned}"
        if not pinned.file and (size := hub.missing_weights(pinned)) is not None:
            line += (
                f": a start downloads {size / 1e9:.3f} GB of weights"
                if size
                else ": no weights are missing"
            )
        yield line


# ---------------------------------------------------------------- the end of a run


def push_model(config: Config, steps: int) -> None:
    """Upload the model if set, on rank 0 when no rank waits for it.

    A failure is logged, and changes no exit status."""
    name = config.save.push_to_hub
    if name is None:
        return
    folder = Path(config.run.output_dir) / EXPORT_FOLDER
    if not exports_merged(config):
        folder /= ADAPTER_FOLDER
    logger.info("Uploading %s to %s ...", folder, name)
    try:
        commit = hub.push(
            name, folder, f"rlmath: {steps} steps", seconds=config.run.hub_timeout_seconds
        )
    except (ValueError, OSError, HubFailedError) as error:
        command = f"hf upload {name} {folder}"
        logger.error(
            'The model was not uploaded to %s: %s Run "%s", or the same command again',
            name,
            error,
            command,
        )
    else:
        logger.info("The model is uploaded to %s%s", name, f", commit {commit}" if commit else "")
