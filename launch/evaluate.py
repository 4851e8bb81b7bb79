"""Evaluate a model on benchmarks, and compare evaluations.

torchrun --nproc-per-node=N launch/evaluate.py --model PATH --benchmarks aime24 --data-dir DIR
--output DIR
"""

from __future__ import annotations

from rlmath.distributed import process

if __name__ == "__main__":
    process.begin_program()  # before torch is imported

import sys

from rlmath.evals.command import main

if __name__ == "__main__":
    sys.exit(main())
