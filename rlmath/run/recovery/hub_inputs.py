"""What a run names by ids of the Hugging Face hub: in the cache of every node before anything is started.

    rank 0              finds the commit of every id: that which the run in the folder has, else the hub's
    all ranks meet      and have rank 0's commits
    a node's first rank downloads what its cache lacks; the others wait
    all ranks meet      and have the places of the files

Where a single rank runs it does all of it by itself. Settings without ids come back as they are, and no rank waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.checkpoint.save_schedule import exports_merged
from rlmath.config import hub
from rlmath.config.help import raise_problems, schema_problems
from rlmath.config.hub import HubFailedError, HubId
from rlmath.config.load import load_config
from rlmath.config.run_files import ADAPTER_FOLDER, CONFIG_FILE, EXPORT_FOLDER
from rlmath.config.schema import Config
from rlmath.distributed.ranks import RankReport, RendezvousResult, environment_rank

if TYPE_CHECKING:
    from rlmath.distributed.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


class SharedMistakeError(ValueError):
    """A mistake that all ranks know of already."""


def fetch_inputs(config: Config, rendezvous: Rendezvous | None) -> Config:
    """The settings with places in this node's cache for ids of the hub. All ranks call it; `rendezvous` is None where
    there is one rank. ValueError for what is wrong, SharedMistakeError where another rank says so, HubFailedError where
    the hub or the network fails, MissingRanksError where ranks are missing or the hub has failed another one."""
    ids = hub.hub_ids(config)
    if not ids:
        return config
    raise_problems("this run", schema_problems(config))  # they are found before hours of downloading
    seconds, start_seconds = config.run.hub_timeout_seconds, config.run.start_timeout_seconds
    recorded = recorded_ids(config) if environment_rank() == 0 else ()
    places = fetch_ids(ids, seconds, rendezvous, start_seconds, recorded)
    return hub.with_places(config, places)


def fetch_ids(
    ids: Sequence[HubId],
    seconds: float,
    rendezvous: Rendezvous | None,
    start_seconds: float,
    recorded: Collection[str] = (),
) -> dict[HubId, str]:
    """The place of every id in this node's cache. Errors and arguments: as `fetch_inputs`; `recorded` is rank 0's."""
    logger.info("Looking for what is named by ids of the Hugging Face hub ...")
    rank = None if rendezvous is None else rendezvous.rank_info
    limit = seconds + start_seconds

    def resolve() -> dict[str, str]:
        return {str(one): pinned.commit for one, pinned in hub.resolve(ids, seconds, recorded).items()}

    def fetch() -> dict[str, str]:
        hub.fetch(list(pins.values()), seconds)
        return {}

    commits = _sync(rendezvous, "hub commits", limit, resolve if rank is None or rank.rank == 0 else dict)
    lost = [str(one) for one in ids if str(one) not in commits]
    if lost:
        raise ValueError(
            f"the settings of this rank name {lost[0]}, those of rank 0 do not. Give all the same."
        )
    pins = {one: hub.with_commit(one, commits[str(one)]) for one in ids}
    _sync(rendezvous, "hub files", limit, fetch if rank is None or rank.is_node_leader else dict)
    places = hub.places(pins.values())
    return {one: places[pinned] for one, pinned in pins.items()}


def _sync(
    rendezvous: Rendezvous | None, name: str, seconds: float, work: Callable[[], Mapping[str, str]]
) -> Mapping[str, str]:
    """What `work` gives on rank 0; where it fails on a rank, all ranks raise. A collective."""
    if rendezvous is None:
        return work()
    rank, values = rendezvous.rank_info, {}
    report = RankReport(rank.host, rank.node)
    try:
        values = work()
    except (ValueError, HubFailedError) as error:
        report = replace(report, problem=str(error), may_pass=isinstance(error, HubFailedError))
    try:
        return rendezvous.sync(name, report, seconds, lambda reports: RendezvousResult(values=values))
    except ValueError as error:
        raise SharedMistakeError(str(error)) from None


def recorded_ids(config: Config) -> list[str]:
    """What the run in the folder was made of, as its config.yaml says. Empty where it starts from the beginning."""
    if config.run.recover_mode == "disabled":
        return []
    with suppress(OSError, ValueError):
        settings = load_config([Path(config.run.output_dir) / CONFIG_FILE], [], saved=True)
        return [str(one) for one in hub.hub_ids(settings)]
    return []


# ---------------------------------------------------------------- a dry run


def plan_inputs(config: Config) -> tuple[Config, list[str]]:
    """The settings with places for a dry run, which needs no weights; and lines about what a start would download."""
    ids = hub.hub_ids(config)
    if not ids:
        return config, []
    raise_problems("this run", schema_problems(config))
    seconds = config.run.hub_timeout_seconds
    pins = hub.resolve(ids, seconds, recorded_ids(config))
    lines = []
    for pinned, missing in hub.fetch(list(pins.values()), seconds, weights=False).items():
        rest = f"a start downloads {missing / 1e9:.3f} GB of weights" if missing else "no weights are missing"
        lines.append(f"Hub: {pinned}: {rest}")
    places = hub.places(pins.values())
    return hub.with_places(config, {one: places[pinned] for one, pinned in pins.items()}), lines


# ---------------------------------------------------------------- the end of a run


def push_model(config: Config, steps: int) -> None:
    """Upload the model if set, on rank 0 when no rank waits for it. A failure is logged, and changes no exit status."""
    name = config.save.push_to_hub
    if name is None:
        return
    folder = Path(config.run.output_dir) / EXPORT_FOLDER
    if not exports_merged(config):
        folder /= ADAPTER_FOLDER
    logger.info("Uploading %s to %s ...", folder, name)
    try:
        commit = hub.push(name, folder, f"rlmath: {steps} steps", config.run.hub_timeout_seconds)
    except (ValueError, OSError, HubFailedError) as error:
        command = f"hf upload {name} {folder}"
        logger.error(
            'The model was not uploaded to %s: %s Run "%s", or the same command again', name, error, command
        )
    else:
        logger.info("The model is uploaded to %s%s", name, f", commit {commit}" if commit else "")
