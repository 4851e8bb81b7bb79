"""The training program on one rank (`rlmath.cli.program`).

Start it by `torchrun --nproc-per-node=N -m rlmath.trainer`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `python -m` has put the current folder first, where random.py would take the place of
        # Python's.
        sys.path.append(sys.path.pop(0))

    from rlmath.distributed import process

    process.begin_program()  # before torch is imported

    from rlmath.cli.program import main

    sys.exit(main())
