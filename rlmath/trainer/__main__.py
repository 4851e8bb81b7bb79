"""`torchrun --nproc-per-node=N -m rlmath.trainer`: the training program (`rlmath.run.program`) on one rank."""

import sys

from rlmath.distributed import process

if __name__ == "__main__":
    process.begin_program()  # before torch is imported

    from rlmath.run.program import main

    sys.exit(main())
