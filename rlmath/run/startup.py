"""How a training program starts and ends on a rank.

    rendezvous -> settings -> checks -> inputs -> run folder -> all nodes compared -> `loop.run_training` -> exit status

A user's mistake is reported before Megatron and vLLM are loaded and before any process group or engine starts: nothing
that is imported here loads them. Every rank checks settings and files by itself; then the nodes are compared, and all
ranks end with the same error where they differ.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch.distributed as dist

from rlmath.config.help import as_yaml_word, setting_values
from rlmath.config.hub import HubFailedError
from rlmath.config.length_curriculum import fewer_steps_warnings, late_steps_warnings, length_stage_lines
from rlmath.config.load import make_parser, shown_values
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, RunConfig
from rlmath.config.terminal import visible
from rlmath.data import dataset
from rlmath.data.audit import DataAudit
from rlmath.distributed import process
from rlmath.distributed.collectives import gather_to_rank_zero
from rlmath.distributed.device import prepare_imports
from rlmath.distributed.device_kind import resolve_kind
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.fault_tolerance.failure import first_line, may_be_caused_by_peer
from rlmath.distributed.fault_tolerance.preemption import end_at_interrupt, under_torchrun
from rlmath.distributed.process import code_hash, end_with_parent, library_versions
from rlmath.distributed.ranks import (
    RankReport,
    RendezvousResult,
    check_launcher_numbers,
    environment_rank,
    environment_world_size,
    hosts_text,
    ranks_text,
    this_rank,
)
from rlmath.distributed.rendezvous import (
    GLOO_INTERFACE,
    MissingRanksError,
    Rendezvous,
    open_rendezvous,
    prefer_for_gloo,
    route_to,
)
from rlmath.planning.checks import check_config, config_warnings, only_used
from rlmath.planning.hook_checks import data_hooks, hook_lines, try_functions
from rlmath.planning.memory_estimate import mesh_of, training_ranks
from rlmath.planning.memory_fit import start_up_lines
from rlmath.planning.parallelism import roles
from rlmath.planning.teacher import check_teacher_tokenizer
from rlmath.run.recovery.hub_inputs import SharedMistakeError, fetch_inputs
from rlmath.run.recovery.resume import (
    Origin,
    Recovery,
    data_fingerprint,
    find_recovery,
    model_fingerprint,
    origin_of,
    sft_origin_of,
)
from rlmath.run.recovery.save_schedule import output_bytes
from rlmath.run.run_dir import check_output_folder, sole_user
from rlmath.telemetry.console import close_bars, setup_logging
from rlmath.workers.hooks import hooks_fingerprint
from rlmath.workers.user_functions import scorer_hook

logger = logging.getLogger(__name__)

OTHER_RANKS_WAIT_SECONDS = 10.0
FIRST_RANK_WAIT_SECONDS = 5.0
"""How long the first rank of a node, which has logged a mistake, waits until the others have found it, too."""
MOST_NODES_NAMED = 16
MOST_CHARACTERS = 200
"""Of a value that differs, in an error."""
MOST_STATUS_CHARACTERS = 2000
"""Of a message in the exit status: a refusal lists all problems."""
CLOCK_SECONDS = 2.0
"""Clocks of nodes that differ by more get a warning: lines of several logs cannot be put in order any more, and a
shared disk's times mislead. Nothing that a run computes depends on them."""

Program = Callable[["PreparedRun[Any]", Rendezvous | None], int]
"""What a rank does once all have met; its exit status. `rendezvous` is None where there is one rank."""

InputsT = TypeVar("InputsT", dataset.Inputs, dataset.SftInputs)


@dataclass(frozen=True)
class PreparedRun(Generic[InputsT]):
    """A run that can be started, as far as files and settings show."""

    config: Config
    shape: ModelShape
    inputs: InputsT
    origin: Origin
    recovery: Recovery | None
    """What there is to resume from, as far as manifests show."""
    lines: tuple[str, ...] = ()
    """For the console."""
    validation: tuple[dataset.ValidationFile, ...] = ()
    warnings: tuple[str, ...] = ()
    """What is odd about the data, and a reward function that took too long on them; on rank 0."""

    @property
    def data_read(self) -> str:
        """Fingerprint of all data that this rank has read."""
        prompts = [prompt for file in self.validation for prompt in file.prompts]
        return f"{self.origin.data} {data_fingerprint(prompts)}"


# ---------------------------------------------------------------- the command line


def read_command_line(
    description: str, argv: Sequence[str] | None = None, keys: Collection[str] | None = None
) -> argparse.Namespace:
    """Of a training program: `config`, `overrides`, `dry_run` and `ranks`. `--help` lists all settings, or those of
    `keys`."""
    exit_without_launcher_numbers()
    parser = make_parser(description, keys)
    dry_run_help = "check the settings and print the plan; nothing is started or written"
    parser.add_argument("--dry-run", action="store_true", help=dry_run_help)
    ranks_help = "ranks of a dry run; without it those of parallel.data, else WORLD_SIZE or the least"
    parser.add_argument("--ranks", type=int, help=ranks_help)
    with mistakes_end_all_ranks():
        given = parser.parse_intermixed_args(argv)
        if given.ranks is not None and not given.dry_run:
            parser.error("--ranks is for --dry-run; torchrun decides how many ranks a run has.")
    return given


@contextmanager
def mistakes_end_all_ranks() -> Iterator[None]:
    """Around the parsing of a command line: only rank 0 prints its help or its mistake, and a mistake ends the ranks as
    in `log_mistake`."""
    try:
        with ExitStack() as stack:
            if environment_rank() != 0:
                stack.enter_context(redirect_stdout(io.StringIO()))
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    except SystemExit as ended:
        if ended.code == exit_codes.MISTAKE:
            message = str(ended.__cause__ or "the command line has a mistake, which is printed above")
            _let_first_rank_end(message, show=lambda: None)
        raise


# ---------------------------------------------------------------- what is known before the start


def prepare_grpo(config: Config) -> PreparedRun[dataset.Inputs]:
    """ValueError for all that can be known to be wrong before a GRPO run starts."""
    world_size = environment_world_size()
    shape = check_config(config, world_size)
    inputs = dataset.load_inputs(config, shape)
    of_teacher = check_teacher_tokenizer(config, inputs.tokenizer)
    origin = origin_of(config, inputs)
    recovery = find_recovery(config, origin, inputs.total_steps)
    check_output_folder(config.run.output_dir, config, output_bytes(config, shape), recovery is not None)
    validation = dataset.load_validation(config, inputs.tokenizer, shape.vocab_size)
    audit, tried = DataAudit(), ()
    if environment_rank() == 0:
        audit = dataset.audit_inputs(config, inputs, validation, inputs.tokenizer)
        tried = try_functions(config, inputs.prompts)
    lines = (
        *config_warnings(config),
        *inputs.lines,
        *hook_lines(config, "grpo"),
        *length_stage_lines(config),
        *(line for file in validation for line in file.lines()),
        *audit.lines(),
        f"Layout: {mesh_of(config, world_size, 0).describe()}",
        *([f"  {who}"] if (who := roles(config, world_size)) else ()),
        *start_up_lines(config, shape, world_size),
    )
    warnings = (
        *tried,
        *of_teacher,
        *audit.warnings(),
        *fewer_steps_warnings(config, inputs.order.steps_per_epoch),
        *late_steps_warnings(config, inputs.total_steps),
    )
    return PreparedRun(config, shape, inputs, origin, recovery, lines, validation, warnings)


def prepare_sft(given: Config) -> PreparedRun[dataset.SftInputs]:
    """ValueError for all that can be known to be wrong before a supervised run starts."""
    world_size = environment_world_size()
    config, unused = only_used(given)
    shape = check_config(config, world_size, "sft")
    inputs = dataset.load_sft_inputs(config, shape)
    origin = sft_origin_of(config, inputs)
    recovery = find_recovery(config, origin, inputs.total_steps)
    check_output_folder(config.run.output_dir, config, output_bytes(config, shape), recovery is not None)
    lines = (
        *config_warnings(config, unused),
        *inputs.lines,
        *hook_lines(config, "sft"),
        *inputs.audit.lines(),
        f"Layout: {mesh_of(config, world_size, 0).training_layout}",
        *start_up_lines(config, shape, world_size, "sft"),
    )
    warnings = (
        *inputs.audit.warnings(),
        *fewer_steps_warnings(config, inputs.order.steps_per_epoch),
        *late_steps_warnings(config, inputs.total_steps),
    )
    return PreparedRun(config, shape, inputs, origin, recovery, lines, (), warnings)


def start(
    load: Callable[[], Config],
    prepare: Callable[[Config], PreparedRun[Any]],
    load_program: Callable[[], Program],
) -> int:
    """Run a training program on this rank; its exit status, one of `fault_tolerance.exit_codes`.

    `load` and `prepare` raise ValueError for all that can be known to be wrong before the start. `load_program` imports
    the program, and Megatron with it; it is called only when all ranks have met. An error after that ends this process
    at once.
    """
    set_up_rank_logging()
    end_at_interrupt(environment_rank())
    config, rendezvous, start_timeout = None, None, RunConfig.start_timeout_seconds
    logger.info("Starting: reading settings, model and data ...")
    with ExitStack() as stack:
        try:
            rendezvous = open_rendezvous(start_timeout)
            try:
                config = load()
                start_timeout = config.run.start_timeout_seconds
                config = fetch_inputs(config, rendezvous)
                prepared = prepare(config)
                if (mistake := launcher_mistake()) is not None:
                    raise ValueError(mistake)
                if environment_rank() == 0:
                    prepared = _take_folder(prepared, stack)
            except (ValueError, OSError) as found:
                error = _with_launcher_mistake(found)
                several = rendezvous is not None and rendezvous.rank_info.several_nodes
                if rendezvous is not None and several and not isinstance(found, SharedMistakeError):
                    meet_with_mistake(rendezvous, error, start_timeout)
                raise error from None
            if rendezvous is not None:
                data = prepared.data_read if data_hooks(prepared.config) else ""
                meet(rendezvous, facts_of(prepared), start_timeout, data)
        except (ValueError, MissingRanksError, HubFailedError) as error:
            status = exit_codes.MISTAKE if isinstance(error, ValueError) else exit_codes.FAILURE
            log_mistake(error)
            stack.close()
            if config is not None:
                record_exit(config.run.output_dir, status, str(error))
            return status
        try:
            if under_torchrun():
                # Without torchrun a rank would wait long for its peers. Once they have met, the heartbeat watches it.
                end_with_parent(os.getppid())
            logger.info("Starting: importing Megatron ...")
            prepare_imports(resolve_kind(prepared.config.run.device))
            # Megatron imports W&B, which takes seconds and makes folders that stay when this process is killed.
            with process.without_module("wandb"):
                from rlmath.run.engine_rank import run_engine_rank

                program = load_program()
            if environment_rank() >= training_ranks(prepared.config, environment_world_size()):
                status = run_engine_rank(prepared, rendezvous)
            else:
                status = program(prepared, rendezvous)
            process.skip_collection_at_exit()
            return status
        except BaseException as error:
            if rendezvous is not None:
                rendezvous.report_failure(first_line(error))
            end_broken()


def set_up_rank_logging() -> None:
    """`setup_logging` for this process's rank."""
    exit_without_launcher_numbers()
    setup_logging(environment_rank())


def exit_without_launcher_numbers() -> None:
    """Where the launcher's variables are no numbers, log it and end this process with MISTAKE: its rank is not
    known."""
    try:
        check_launcher_numbers()
    except ValueError as error:
        setup_logging(0)
        logger.error("%s", error)
        sys.exit(exit_codes.MISTAKE)


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launcher_mistake() -> str | None:
    """What to say where this process was not started by torchrun, or by something that sets what torchrun sets: the
    ranks of a run find each other by it, and what ends a broken run depends on it. None where it was."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if not missing:
        return None
    program = sys.argv[0] or "launch/train_grpo.py"
    if program.endswith("__main__.py"):
        program = "-m rlmath.trainer"
    return (
        f"this program was started without torchrun: {', '.join(missing)} not set. Start it by torchrun "
        f"--nproc-per-node=N {program} ..., with N=1 for one rank, or by `rlmath train`; "
        "only --help and a dry run need none."
    )


def _with_launcher_mistake(error: ValueError | OSError) -> ValueError | OSError:
    """Without torchrun there is one rank, which may be why the settings do not fit."""
    mistake = launcher_mistake()
    return error if mistake is None or mistake in str(error) else ValueError(f"{error}\n{mistake}")


def _take_folder(prepared: PreparedRun[Any], stack: ExitStack) -> PreparedRun[Any]:
    """For rank 0: keep other runs out of the folder, and look again at what an earlier one may just have left there."""
    config = prepared.config
    stack.enter_context(sole_user(config.run.output_dir))
    exit_codes.reserve_exit_status(config.run.output_dir)
    recovery = find_recovery(config, prepared.origin, prepared.inputs.total_steps)
    return replace(prepared, recovery=recovery)


# ---------------------------------------------------------------- how a program ends


def record_exit(output_dir: str | Path | None, status: int, message: str) -> None:
    """Rank 0 writes a message's first line, or the list of a user's mistakes, into the folder's exit status; not into a
    folder that does not exist (None: not known), nor into one that another program uses."""
    if environment_rank() != 0 or output_dir is None:
        return
    with suppress(ValueError, OSError):
        if Path(output_dir).is_dir():
            with sole_user(output_dir):
                text = visible(message)
                if status != exit_codes.MISTAKE:
                    text = text.partition("\n")[0]
                cut = (
                    text if len(text) <= MOST_STATUS_CHARACTERS else f"{text[:MOST_STATUS_CHARACTERS]} [...]"
                )
                exit_codes.write_exit_status(output_dir, status, cut)


def log_mistake(error: Exception) -> None:
    """The first rank of each node logs first, and is in torchrun's report: it ends the others as soon as one has ended.
    What only another rank sees is logged after a wait."""
    message = str(error)
    _let_first_rank_end(message, show=lambda: logger.error("%s", message))


def _let_first_rank_end(message: str, show: Callable[[], None]) -> None:
    is_first = os.environ.get("LOCAL_RANK", str(environment_rank())) == "0"
    if not is_first:
        exit_codes.wait_for_torchrun(OTHER_RANKS_WAIT_SECONDS)
    show()
    exit_codes.report_to_torchrun(message)
    if is_first:
        exit_codes.wait_for_waiting_ranks(FIRST_RANK_WAIT_SECONDS)


def end_broken() -> NoReturn:
    """Call it where an error is handled: log it, and end this process at once. Threads and process groups of a broken
    program may wait for peers that wait for us."""
    close_bars()
    logger.exception("Rank %d on %s failed:", environment_rank(), socket.gethostname())
    error = sys.exc_info()[1]
    if error is not None and not may_be_caused_by_peer(error):
        exit_codes.report_to_torchrun(f"{first_line(error)} (its traceback is above)")
    logging.shutdown()
    os._exit(exit_codes.FAILURE)


# ---------------------------------------------------------------- all nodes must be alike


def meet_with_mistake(rendezvous: Rendezvous, mistake: ValueError | OSError, seconds: float) -> None:
    """Report what only this node may see. Raises ValueError with what all ranks found, MissingRanksError where ranks
    are missing after `seconds`."""
    report = RankReport(rendezvous.rank_info.host, rendezvous.rank_info.node, problem=str(mistake))
    try:
        rendezvous.sync("start", report, seconds, _compare_nodes)
    except MissingRanksError as lost:
        raise MissingRanksError(f"{mistake}\nThe other ranks could not be reached: {lost}") from mistake


def meet(rendezvous: Rendezvous, facts: Mapping[str, str], seconds: float, data: str = "") -> None:
    """Come together before anything is started. ValueError, on all ranks, where any rank found a mistake or nodes
    differ; MissingRanksError where ranks are missing after `seconds`. `data` is the fingerprint of what this rank has
    read, where a function of the user's may have given it something else than others."""
    place, address = rendezvous.rank_info, ""
    if place.several_nodes:
        route = route_to(os.environ["MASTER_ADDR"])
        prefer_for_gloo(route)
        address = "" if route is None else str(route)
        if route is not None and os.environ.get(GLOO_INTERFACE, route.interface) != route.interface:
            address += f", gloo over {os.environ[GLOO_INTERFACE]}"
    report = RankReport(place.host, place.node, data=data)
    if place.is_node_leader:
        report = replace(report, facts=facts, address=address)
    rendezvous.sync("start", report, seconds, _compare_nodes)


def facts_of(prepared: PreparedRun[Any]) -> dict[str, str]:
    """What of a run must be the same on all nodes, by name; of its settings those that are not at their defaults."""
    origin = {
        "model.path (contents)": prepared.origin.model,
        "training data (contents)": prepared.origin.data,
        "reward.function (contents)": prepared.origin.reward or "none",
        "functions of yours (contents)": prepared.origin.hooks or "none",
    }
    if prepared.validation and (scorer := scorer_hook(prepared.config)) is not None:
        origin["validation.scorer (contents)"] = hooks_fingerprint([scorer])
    values, defaults = shown_values(prepared.config), setting_values(Config())
    critic = prepared.config.critic.path if prepared.config.algorithm.advantage == "gae" else None
    for name, path in (("teacher", prepared.config.teacher.path), ("critic", critic)):
        if path is not None:
            origin[f"{name}.path (contents)"] = model_fingerprint(path)
    settings = {key: as_yaml_word(value) for key, value in values.items() if value != defaults[key]}
    return environment_facts() | origin | settings


def environment_facts() -> dict[str, str]:
    """What of the installation must be the same on all nodes, by name."""
    python = platform.python_version()
    return {"Python": python} | library_versions() | {"rlmath's code (hash)": code_hash()}


# ---------------------------------------------------------------- what rank 0 compares


def _compare_nodes(reports: Mapping[int, RankReport]) -> RendezvousResult:
    nodes = {label: report for label, report in labelled(reports).items() if report.facts}
    problems = list(differences({label: report.facts for label, report in nodes.items()}))
    problems += list(_lonely_loopbacks(nodes))
    if len({report.data for report in reports.values()}) > 1:
        first = reports[min(reports)].data
        others = [rank for rank, report in reports.items() if report.data != first]
        problems.append(
            f"what a function of yours makes of the data: {ranks_text(others)} read other prompts than rank "
            f"{min(reports)}. It must give the same for the same row in every process, without random numbers and "
            "clocks"
        )
    if problems:
        text = "\n".join(f"  {problem}" for problem in problems)
        return RendezvousResult(f"The nodes differ, and must be alike in:\n{text}", is_mistake=True)
    for line in node_lines(reports):
        logger.info("%s", line)
    return RendezvousResult()


def labelled(reports: Mapping[int, RankReport]) -> dict[str, RankReport]:
    """One report of each node, by its host's name; with its number where several nodes have one name."""
    first: dict[int, RankReport] = {}
    for _, report in sorted(reports.items()):
        first.setdefault(report.node, report)
    hosts = [report.host for report in first.values()]
    return {
        report.host if hosts.count(report.host) == 1 else f"{report.host} (node {node})": report
        for node, report in first.items()
    }


def differences(facts_of_node: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """One line for each fact that is not the same on all nodes: what it is where, the rarest first.

    >>> list(differences({"a": {"torch": "2.13.0"}, "b": {"torch": "2.13.0"}, "c": {"torch": "2.12.1"}}))
    ['torch: 2.12.1 on c; 2.13.0 on a, b']
    """
    for name in dict.fromkeys(name for facts in facts_of_node.values() for name in facts):
        nodes_with: dict[str, list[str]] = {}
        for node, facts in facts_of_node.items():
            default = "its default" if "." in name and "(" not in name else "not there"
            nodes_with.setdefault(facts.get(name, default), []).append(node)
        if len(nodes_with) > 1:
            rarest = sorted(nodes_with.items(), key=lambda one: len(one[1]))
            parts = [f"{value[:MOST_CHARACTERS]} on {hosts_text(nodes)}" for value, nodes in rarest]
            yield f"{name}: {'; '.join(parts[:MOST_NODES_NAMED])}"


def _lonely_loopbacks(nodes: Mapping[str, RankReport]) -> Iterator[str]:
    """Nodes on which the first node's name resolves to a loopback address, while other nodes use a real one."""
    inside = [node for node, report in nodes.items() if report.address.startswith(("127.", "::1"))]
    if inside and len(inside) < len(nodes) and any("gloo over" not in nodes[node].address for node in inside):
        yield (
            f"the name of the first node stands for {nodes[inside[0]].address} on {hosts_text(inside)}, where the "
            f"others cannot come. Correct /etc/hosts there, or set {GLOO_INTERFACE} to the interface that the others "
            "reach and start torchrun with --local-addr"
        )


def node_lines(reports: Mapping[int, RankReport]) -> list[str]:
    """Which ranks are where, by which address: a line for each of the first nodes; none where there is only one."""
    ranks_on: dict[int, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks_on.setdefault(report.node, []).append(rank)
    if len(ranks_on) < 2:
        return []
    lines = [f"{len(ranks_on)} nodes, {len(reports)} ranks:"]
    for label, report in list(labelled(reports).items())[:MOST_NODES_NAMED]:
        lines.append(f"  {label}: {ranks_text(ranks_on[report.node])}, {report.address or 'address unknown'}")
    if len(ranks_on) > MOST_NODES_NAMED:
        lines.append(f"  and {len(ranks_on) - MOST_NODES_NAMED} more nodes")
    return lines


# ---------------------------------------------------------------- clocks
def compare_clocks() -> None:
    """Warn, on rank 0, of nodes whose clocks differ. A collective, once at the start of a run on several nodes."""
    place = this_rank()
    if not place.several_nodes:
        return
    dist.barrier()
    mine = (place.host, time.time()) if place.is_node_leader else None
    for line in clock_warnings([one for one in gather_to_rank_zero(mine) or [] if one is not None]):
        logger.warning("%s", line)


def clock_warnings(clocks: Sequence[tuple[str, float]]) -> list[str]:
    """Warnings about clocks that were read at the same moment, of (host, seconds since 1970); the first is the
    measure.

    >>> clock_warnings([("a", 100.0), ("b", 100.4), ("c", 131.0)])
    ['The clocks of nodes differ from that of a: c by +31.0 s. Let them keep time (chrony, NTP)']
    """
    off = [(host, at - clocks[0][1]) for host, at in clocks if abs(at - clocks[0][1]) > CLOCK_SECONDS]
    if not off:
        return []
    text = hosts_text([f"{host} by {seconds:+.1f} s" for host, seconds in off])
    return [
        f"The clocks of nodes differ from that of {clocks[0][0]}: {text}. Let them keep time (chrony, NTP)"
    ]
