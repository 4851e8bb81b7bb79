"""Convert a Hugging Face model to a Megatron-Core torch_dist checkpoint.

python tools/convert_hf_to_megatron.py --hf DIR --output DIR [--tensor-parallel 2] [--pipeline-parallel 2]

The output has what Megatron-LM's --load looks for:

    release/                            the checkpoint: weights alone
    latest_checkpointed_iteration.txt   "release": Megatron-LM then asks for no optimizer, and begins at iteration 0
    hf/                                 config.json and tokenizer, for the way back

Any tensor, pipeline, expert and data parallel size can load it. --tensor-parallel says to a multiple of what the
vocabulary is filled up with zero rows (Megatron loads it, too, where it fills up otherwise), and both over how many
files the tensors are spread. No GPU, no torchrun; memory for the largest tensor, not for the model. It exits with 2 for
a mistake or a damaged source, and with 1 where the disk fails; nothing half-written stays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlmath.checkpoint.convert.convert import DTYPES, check_output, hf_to_megatron
from rlmath.config.hub import local_folder
from rlmath.config.terminal import escape_terminal
from rlmath.models.hf_config import read_model_shape

FAILED, MISTAKE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, FAILED or MISTAKE."""
    escape_terminal()
    given = parse(argv)
    start = time.perf_counter()
    try:
        check_output(given.output)
        sizes = (given.tensor_parallel, given.pipeline_parallel)
        if min(sizes) < 1:
            raise ValueError(f"--tensor-parallel and --pipeline-parallel are {sizes}; needed: at least 1.")
        source = local_folder(given.hf, "--hf")
        shape = read_model_shape(source, "--hf")
        converted = hf_to_megatron(source, shape, given.output, *sizes, DTYPES[given.dtype])
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except (OSError, RuntimeError) as error:
        print(f"{given.output} could not be written: {error}", file=sys.stderr)
        return FAILED
    print(converted.line(given.output, time.perf_counter() - start))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hf", required=True, help="folder with config.json and safetensors, or hf://org/name[@revision]"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to make; it must not exist, or be empty"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="auto", help="default auto: as in the source"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
