"""How a rank joins its run once all ranks have met.

It joins the process group and the heartbeat, decides what an error does, and claims the run's
folder."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlmath.config.help import all_settings, as_yaml_word
from rlmath.config.load import config_as_yaml, shown_values
from rlmath.config.run_files import CONFIG_FILE, LOG_FILE
from rlmath.config.schema import Config, Kind
from rlmath.data.loader import write_report
from rlmath.distributed.bridge import Bridge, open_worlds
from rlmath.distributed.collectives import all_gather_objects, broadcast_from_rank_zero
from rlmath.distributed.device import SHARED_GPU, Device, gpu_name, init_process_group
from rlmath.distributed.fault_tolerance.failure import may_be_caused_by_peer
from rlmath.distributed.fault_tolerance.heartbeat import Heartbeat
from rlmath.distributed.fault_tolerance.preemption import StopRequest, launcher_advice
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.process import library_versions, outlive_parent
from rlmath.distributed.ranks import (
    RankReport,
    RendezvousResult,
    environment_rank,
    environment_world_size,
    hosts_text,
)
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.run.prepared import PreparedRun
from rlmath.run.recovery.resume import CheckpointToResume
from rlmath.run.run_dir import claim_run_folder
from rlmath.telemetry.console import open_log_file
from rlmath.trainer.base import Trainer

logger = logging.getLogger(__name__)


def join_run(
    stack: ExitStack,
    config: Config,
    device: Device,
    rendezvous: Rendezvous | None,
    stop: StopRequest,
    on_error: OnError | None = None,
) -> tuple[Bridge | None, Heartbeat]:
    """Join the process group and the heartbeat of all ranks, which `stack` ends.

    If engines have ranks of their own there are two process groups, and the rank joins its own. A
    collective of all ranks of the run."""
    store = group_store(rendezvous, config, device)
    timeout = config.run.distributed_timeout_seconds
    bridge = None
    if config.rollout.ranks:
        assert store is not None, "a run with engines on ranks of their own has several ranks"
        bridge = open_worlds(device, timeout, store, engine_ranks=config.rollout.ranks)
    else:
        init_process_group(device, timeout, store)
    heartbeat = Heartbeat(
        config.run,
        environment_rank(),
        world_size=environment_world_size(),
        output_dir=config.run.output_dir,
        stop=stop,
        broadcast=broadcast_from_rank_zero if bridge is None else bridge.broadcast,
    )
    stack.enter_context(heartbeat)
    outlive_parent()
    stack.push(on_error or OnError())
    return bridge, heartbeat


def group_store(rendezvous: Rendezvous | None, config: Config, device: Device) -> dist.Store | None:
    """The store of the process group.

    All ranks meet once more before it is used, so that missing ranks are named: a process group
    would wait for them in silence. ValueError if an engine on a rank of its own measures the memory
    of a shared GPU."""
    if rendezvous is None:
        return None
    run = config.run
    rollout = config.rollout
    rank_info = rendezvous.rank_info
    measures = device.kind == "cuda" and rollout.ranks and rollout.kv_cache_gib is None
    report = RankReport(rank_info.host, rank_info.node, gpu=gpu_name() if measures else "")
    rendezvous.sync("group", report, run.start_timeout_seconds, check=refuse_shared_gpus)
    return rendezvous.group_store(run.distributed_timeout_seconds)


def refuse_shared_gpus(reports: Mapping[int, RankReport]) -> RendezvousResult:
    """A refusal if two ranks report the same GPU."""
    gpus = [report.gpu for report in reports.values() if report.gpu]
    return RendezvousResult(SHARED_GPU if len(set(gpus)) < len(gpus) else None, is_mistake=True)


class OnError:
    """What a rank does about an error before anything else."""

    trainer: Trainer | None = None
    """None until it is built."""

    def __call__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Log the error in one line, then write the last step.

        The error is logged at once: closing what is open may take long, and the heartbeat does not
        wait for it. An error that another rank may have caused goes into the log file only, as the
        heartbeat looks for that rank. If a peer may have failed, rank 0 alone writes the last
        step."""
        if kind is None or error is None:
            return
        rank = environment_rank()
        host = socket.gethostname()
        has_peers = environment_world_size() > 1
        caused_by_peer = has_peers and may_be_caused_by_peer(error)
        if caused_by_peer:
            text = (
                "rank %d on %s fails, as it does when another rank has ended: looking for the cause"
            )
            logger.warning(text, rank, host)
        level = logging.DEBUG if caused_by_peer else logging.ERROR
        logger.log(
            level, "rank %d on %s failed; the run ends: %s: %s", rank, host, kind.__name__, error
        )
        if self.trainer is not None and (rank == 0 or not may_be_caused_by_peer(error)):
            self.trainer.write_last_step(f"failed on rank {rank}: {kind.__name__}: {error}")


def claim_folder(
    prepared: PreparedRun[Any], mesh: Mesh, resumed: CheckpointToResume | None, kind: Kind
) -> None:
    """Make `run.output_dir` this run's, and log its start.

    A collective. ValueError if a rank does not see the folder."""
    config = prepared.config
    if mesh.rank == 0:
        claim_run_folder(
            config.run.output_dir, config, None if resumed is None else resumed[1].step
        )
        log_settings(config, kind)
        advice = launcher_advice(config.run.stop_grace_seconds)
        for text in with_details((*filter(None, [advice]), *prepared.lines)):
            logger.info("%s", text)
        for text in prepared.warnings:
            logger.warning("%s", text)
        write_report(config.run.output_dir, prepared.inputs.reports)
    dist.barrier()
    folder = Path(config.run.output_dir)
    host = None if (folder / CONFIG_FILE).is_file() else socket.gethostname()
    blind_hosts = list(dict.fromkeys(name for name in all_gather_objects(host) if name is not None))
    if blind_hosts:
        raise ValueError(
            f'what rank 0 wrote into run.output_dir "{folder}" is not seen on '
            f"{hosts_text(blind_hosts)}; it must lie on a "
            "disk that all nodes share"
        )


def log_settings(config: Config, kind: Kind) -> None:
    """Log all settings into the run's log file; only those not at their defaults on the console."""
    folder = Path(config.run.output_dir)
    try:
        open_log_file(folder)
    except OSError as error:
        logger.warning(
            "%s cannot be written: %s. The run continues without it", folder / LOG_FILE, error
        )
    changed = changed_settings(config)
    unused = changed.pop("sft", []) if kind == "grpo" else []
    settings_text = "\n".join(
        f"  {section}: {', '.join(settings)}" for section, settings in changed.items()
    )
    logger.info(
        "Settings that are not at their defaults; all are in %s:\n%s", CONFIG_FILE, settings_text
    )
    if unused:
        logger.warning(
            "Without effect in a GRPO run: %s", ", ".join(f"sft.{setting}" for setting in unused)
        )
    logger.debug("The settings of this run:\n%s", config_as_yaml(config))
    logger.debug("Versions: %s", library_versions())


def with_details(lines: Iterable[str]) -> list[str]:
    """Texts of a line and the indented ones below it, which are its details.

    >>> with_details(["Memory:", "  sync: 1 GiB", "Layout: TP1"])
    ['Memory:\\n  sync: 1 GiB', 'Layout: TP1']
    """
    texts: list[str] = []
    for line in lines:
        if texts and line.startswith(" "):
            texts[-1] += f"\n{line}"
        else:
            texts.append(line)
    return texts


def changed_settings(config: Config) -> dict[str, list[str]]:
    """The settings that are not at their defaults, by section.

    For example {"data": ["prompts_per_step=8"], ...}."""
    sections: dict[str, list[str]] = {}
    for key, value in shown_values(config).items():
        setting = all_settings()[key]
        if value != setting.default:
            sections.setdefault(setting.section, []).append(f"{setting.name}={as_yaml_word(value)}")
    return sections
