"""End with the status that a run ended with, for scripts; torchrun itself ends with 1 whatever its ranks ended with.

torchrun ... launch/train_grpo.py ARGUMENTS || python launch/exit_status.py ARGUMENTS

0 finished, 1 failed, 2 mistake in the settings, 75 saved and stopped, 76 not saved in time (see rlmath/guard).
With RLMATH_CLEAR_EXIT_STATUS=1 it forgets an earlier run's status instead.
"""

from __future__ import annotations

import os
import sys

from rlmath.config_files import load_config, split_arguments
from rlmath.guard.exit_status import MEANINGS, MISTAKE, clear_exit_status, read_exit_status


def main() -> int:
    try:
        folder = load_config(
            *split_arguments("Tell how the last run of these settings ended.")
        ).run.output_dir
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    if os.environ.get("RLMATH_CLEAR_EXIT_STATUS") == "1":
        clear_exit_status(folder)
        return 0
    found = read_exit_status(folder)
    print(f"status {found.status} ({MEANINGS[found.status]}): {found.message}")
    return found.status


if __name__ == "__main__":
    sys.exit(main())
