"""`rlmath report`: one HTML page of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlmath.config.run_files import COMPARED_FILE, REPORT_FILE
from rlmath.config.terminal import escape_terminal
from rlmath.report.run_folder import NoRunError
from rlmath.report.write import NoPlotlyError, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and prints where it is.

    2 and one line on stderr where a RUN is none, or the arguments are wrong; 1 where plotly is
    missing or the page cannot be written."""
    escape_terminal()
    parser = argparse.ArgumentParser(
        prog="rlmath report",
        description="Turn the folders of runs into one HTML file with their curves, settings, "
        "warnings and samples. "
        "It needs no network, and a run may still be going on.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (run.output_dir); several are compared",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"file to write (default: {REPORT_FILE} in RUN, {COMPARED_FILE} in the first of "
        "several)",
    )
    parser.add_argument(
        "--eval",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="--output of an evaluation of a model of the runs, or of the one they began with; "
        "may be given again; "
        "those in the folder of a run and beside it are found without",
    )
    arguments = parser.parse_args(argv)
    if arguments.output is not None and arguments.output.is_dir():
        print(
            f'report: got --output "{arguments.output}", a folder; needed: a file to write',
            file=sys.stderr,
        )
        return 2
    try:
        path = write_report(arguments.runs, arguments.output, arguments.eval)
    except NoRunError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except (NoPlotlyError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(f"Wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")
    return 0
