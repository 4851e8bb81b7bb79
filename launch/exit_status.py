"""Exit with the status of a run, for scripts.

torchrun itself exits with 1 whatever its ranks exited with.

torchrun ... launch/train_grpo.py ... run.output_dir=FOLDER || python launch/exit_status.py FOLDER

FOLDER is run.output_dir, or --output of an evaluation. 0 finished, 1 failed, 2 mistake in the
settings, 75 saved and stopped, 76 not saved in time, 77 diverged. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import sys

from rlmath.config.terminal import escape_terminal
from rlmath.distributed.fault_tolerance.exit_codes import MEANINGS, read_exit_status


def main() -> int:
    escape_terminal()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", help="what the run writes into")
    exit_status = read_exit_status(parser.parse_args().folder)
    print(f"status {exit_status.status} ({MEANINGS[exit_status.status]}): {exit_status.message}")
    return exit_status.status


if __name__ == "__main__":
    sys.exit(main())
