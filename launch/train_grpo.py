"""Train a model with GRPO.

torchrun --nproc-per-node=N launch/train_grpo.py --config configs/x.yaml key.sub=value ...
python launch/train_grpo.py --config configs/x.yaml --dry-run

The step is in rlmath/trainer/grpo.py.
"""

from __future__ import annotations

from rlmath.distributed import process

if __name__ == "__main__":
    process.begin_program()  # before torch is imported

import sys

from rlmath.run.program import train_grpo as main

if __name__ == "__main__":
    sys.exit(main())
