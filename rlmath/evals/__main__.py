"""Evaluate a model: torchrun --nproc-per-node=N -m rlmath.evals --help"""

from __future__ import annotations

from rlmath.distributed import process

if __name__ == "__main__":
    process.begin_program()  # before torch is imported

import sys

from rlmath.evals.command import main

if __name__ == "__main__":
    sys.exit(main())
