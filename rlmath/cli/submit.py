"""`rlmath submit`: launch/slurm/submit.py, which is also a program of its own."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from rlmath.config.shipped_files import shipped


def main(argv: Sequence[str]) -> int:
    """Its exit status."""
    sys.argv[1:] = argv
    try:
        runpy.run_path(str(shipped("launch/slurm/submit.py")), run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
