"""Train a model on written solutions: cross-entropy on completions.

torchrun --nproc-per-node=N launch/train_sft.py --config configs/x.yaml key.sub=value ...
python launch/train_sft.py --config configs/x.yaml --dry-run

The step is in rlmath/trainer/sft.py.
"""

from __future__ import annotations

from rlmath.distributed import process

if __name__ == "__main__":
    process.begin_program()  # before torch is imported

import sys
from collections.abc import Sequence

from rlmath.cli import program


def main(argv: Sequence[str] | None = None) -> int:
    return program.main(["sft", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
