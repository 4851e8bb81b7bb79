"""The command line of a program of several ranks, and how a user's mistake ends all alike; torch is
not imported."""

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
    """What `program_parser` makes of the words of one of several ranks."""
    parser = program_parser(description, keys)
    with mistakes_end_all_ranks():
        given = parser.parse_intermixed_args(argv)
        if given.ranks is not None and not given.dry_run:
            parser.error(
                "--ranks is for rlmath train and --dry-run; under torchrun it is --nproc-per-node."
            )
        if given.oversubscribe and not given.dry_run:
            parser.error(
                f"{OVERSUBSCRIBE} is for rlmath train and --dry-run; torchrun starts what it is "
                "told to."
            )
    return given


@contextmanager
def mistakes_end_all_ranks() -> Iterator[None]:
    """Around parsing: only rank 0 prints its help or its mistake, and a mistake ends the ranks as
    in `log_mistake`."""
    try:
        with ExitStack() as stack:
            if environment_rank() != 0:
                stack.enter_context(redirect_stdout(io.StringIO()))
                stack.enter_context(redirect_stderr(io.StringIO()))
            yield
    except SystemExit as ended:
        if ended.code == exit_codes.MISTAKE:
            message = str(
                ended.__cause__ or "the command line has a mistake, which is printed above"
            )
            let_first_rank_end(message, show=lambda: None)
        raise


def set_up_rank_logging() -> None:
    """`setup_logging` for this process's rank."""
    setup_logging(environment_rank())


# ---------------------------------------------------------------- what started the program


def launcher_mistake() -> str | None:
    """What to say where this process was not started by torchrun, or by something that sets what
    torchrun sets: the ranks of a run find each other by it, and what ends a broken run depends on
    it. None where it was."""
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

    What `load` or `check` find wrong with its settings is told before: without torchrun there is
    one rank, which may be why they do not fit."""
    set_up_rank_logging()
    output_dir, message = None, mistake
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
    """Rank 0 writes a message's first line, or the list of a user's mistakes, into the folder's
    exit status; not into a folder that does not exist (None: not known), nor into one that another
    program uses."""
    if environment_rank() != 0 or output_dir is None:
        return
    with suppress(ValueError, OSError):
        if Path(output_dir).is_dir():
            with sole_user(output_dir):
                text = visible(message)
                if status != exit_codes.MISTAKE:
                    text = text.partition("\n")[0]
                cut = (
                    text
                    if len(text) <= MOST_STATUS_CHARACTERS
                    else f"{text[:MOST_STATUS_CHARACTERS]} [...]"
                )
                exit_codes.write_exit_status(output_dir, status, cut)


def log_mistake(error: Exception) -> None:
    """The first rank of each node logs first, and is in torchrun's report: it ends the others as
    soon as one has ended. What only another rank sees is logged after a wait."""
    message = str(error)
    let_first_rank_end(message, show=lambda: logger.error("%s", message))


def let_first_rank_end(message: str, show: Callable[[], None]) -> None:
    is_first = os.environ.get("LOCAL_RANK", str(environment_rank())) == "0"
    if not is_first:
        exit_codes.wait_for_torchrun(OTHER_RANKS_WAIT_SECONDS)
    show()
    exit_codes.report_to_torchrun(message)
    if is_first:
        exit_codes.wait_for_waiting_ranks(FIRST_RANK_WAIT_SECONDS)
