"""The command line of a program of several ranks, and how a user's mistake ends all of them.

Nothing here imports torch."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from rlmath.config.load import make_parser
from rlmath.config.schema import Config
from rlmath.config.terminal import visible
from rlmath.distributed.fault_tolerance import exit_codes
from rlmath.distributed.ranks import environment_rank
from rlmath.planning.machine_room import OVERSUBSCRIBE
from rlmath.run.run_dir import sole_user
from rlmath.telemetry.console import setup_logging

logger = logging.getLogger(__name__)

OTHER_RANKS_WAIT_SECONDS = 10.0
FIRST_RANK_WAIT_SECONDS = 5.0
"""How long the first rank of a node, which has logged a mistake, waits until the others have found
it, too."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MOST_STATUS_CHARACTERS = 2000
"""Most characters of a message that the exit status keeps: a refusal lists all problems."""


def program_parser(
    description: str = "", keys: Collection[str] | None = None
) -> argparse.ArgumentParser:
    """The words of a program: `config`, `overrides`, `dry_run`, `ranks`, `oversubscribe`.

    `--help` lists settings, all or those of `keys`."""
    parser = make_parser(description, keys)
    dry_run_help = "check the settings and print the plan; nothing is started or written"
    parser.add_argument("--dry-run", action="store_true", help=dry_run_help)
    ranks_help = (
        "ranks of this run; default: one for each GPU, on CPU the least that the layout takes"
    )
    parser.add_argument("--ranks", type=int, help=ranks_help)
    crowd_help = "start more ranks than this machine has GPUs, or cores and memory for"
    parser.add_argument(OVERSUBSCRIBE, action="store_true", help=crowd_help)
    return parser


def read_command_line(
    description: str, argv: Sequence[str] | None = None, keys: Collection[str] | None = None
) -> argparse.Namespace:
    """The parsed command line of one of several ranks, by `program_parser`."""
    parser = program_parser(description, keys)
    with mistakes_end_all_ranks():
        arguments = parser.parse_intermixed_args(argv)
        if arguments.ranks is not None and not arguments.dry_run:
            parser.error(
                "--ranks is for rlmath train and --dry-run; under torchrun it is --nproc-per-node."
            )
        if arguments.oversubscribe and not arguments.dry_run:
            parser.error(
                f"{OVERSUBSCRIBE} is for rlmath train and --dry-run; torchrun starts what it is "
                "told to."
            )
    return arguments


@contextmanager
def mistakes_end_all_ranks() -> Iterator[None]:
    """Let only rank 0 print help or a mistake while the command line is parsed.

    A mistake ends the ranks as in `log_mistake`."""
    try:
        with ExitStack() as stack:
            if environment_rank() != 0:
                stack.enter_context(redirect_stdout(io.StringIO()))
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    except SystemExit as system_exit:
        if system_exit.code == exit_codes.MISTAKE:
            message = str(
                system_exit.__cause__ or "the command line has a mistake, which is printed above"
            )
            let_first_rank_end(message, show=lambda: None)
        raise


def set_up_rank_logging() -> None:
    """`setup_logging` for this process's rank."""
    setup_logging(environment_rank())


# ---------------------------------------------------------------- what started the program


def launcher_mistake() -> str | None:
    """The message for a process that was not started by torchrun; None if it was.

    A launcher that sets the same variables counts as torchrun: the ranks of a run find each other
    by them, and what ends a broken run depends on them."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if not missing:
        return None
    return (
        f"this program was started without torchrun: {', '.join(missing)} not set. Start it by "
        "`rlmath train`, or by "
        f"torchrun --nproc-per-node=N {sys.argv[0]} ...; only --help and a dry run need none."
    )


def refuse_launcher(
    mistake: str, load: Callable[[], Config], check: Callable[[Config], object]
) -> int:
    """Exit status of a program that torchrun has not started.

    Problems that `load` or `check` find in its settings are logged first: without torchrun there
    is one rank, which may be why they do not fit."""
    set_up_rank_logging()
    output_dir = None
    message = mistake
    try:
        config = load()
        output_dir = config.run.output_dir
        check(config)
    except (ValueError, OSError) as error:
        message = f"{error}\n{mistake}"
    log_mistake(ValueError(message))
    record_exit(output_dir, exit_codes.MISTAKE, message)
    return exit_codes.MISTAKE


# ---------------------------------------------------------------- how a program ends


def record_exit(output_dir: str | Path | None, status: int, message: str) -> None:
    """Write a message's first line, or a user's mistakes, into the folder's exit status.

    Rank 0 alone writes it, and neither into a folder that does not exist (None: not known) nor
    into one that another program uses."""
    if environment_rank() != 0 or output_dir is None:
        return
    with suppress(ValueError, OSError):
        if Path(output_dir).is_dir():
            with sole_user(output_dir):
                text = visible(message)
                if status != exit_codes.MISTAKE:
                    text = text.partition("\n")[0]
                shortened = (
                    text
                    if len(text) <= MOST_STATUS_CHARACTERS
                    else f"{text[:MOST_STATUS_CHARACTERS]} [...]"
                )
                exit_codes.write_exit_status(output_dir, status, shortened)


def log_mistake(error: Exception) -> None:
    """Log a user's mistake, the first rank of each node before the others.

    Torchrun ends all ranks as soon as one has ended, and reports that one: the first. A mistake
    that only another rank sees is logged after a wait."""
    message = str(error)
    let_first_rank_end(message, show=lambda: logger.error("%s", message))


def let_first_rank_end(message: str, show: Callable[[], None]) -> None:
    """Call `show` and report the message to torchrun, on the first rank of the node first."""
    is_first = os.environ.get("LOCAL_RANK", str(environment_rank())) == "0"
    if not is_first:
        exit_codes.wait_for_torchrun(OTHER_RANKS_WAIT_SECONDS)
    show()
    exit_codes.report_to_torchrun(message)
    if is_first:
        exit_codes.wait_for_waiting_ranks(FIRST_RANK_WAIT_SECONDS)
