"""Convert models between Hugging Face's form and Megatron-Core's checkpoints.

rlmath convert to-megatron --hf DIR --output DIR [--tensor-parallel 2] [--pipeline-parallel 2]
rlmath convert to-hf --checkpoint DIR --output DIR [--config HF_DIR] [--critic | --adapter | --base
HF_DIR]

No GPU, no torchrun; memory for the largest tensor, not for the model. It exits with 2 for a mistake
or a damaged source, and with 1 where the disk fails; nothing half-written stays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.checkpoint.convert.sources import MegatronSource, check_output, find_megatron
from rlmath.checkpoint.directory import CRITIC, CRITIC_CONFIG, PROGRESS, SETTINGS, read_progress
from rlmath.checkpoint.hf.config_json import read_critic_shape, read_model_shape
from rlmath.config.files import MAX_JSON_BYTES, read_regular
from rlmath.config.hub import HubFailedError, local_folder
from rlmath.config.load import load_config
from rlmath.config.model_shape import ModelShape
from rlmath.config.run_files import write_whole
from rlmath.config.terminal import escape_terminal

if TYPE_CHECKING:
    from rlmath.checkpoint.convert.convert import Converted

FAILED = 1
MISTAKE = 2
AUTO_HELP = "default auto: as the model that the run began with has it, or else the checkpoint"
FORMATS = ("auto", "bfloat16", "float16", "float32")
CONFIG = "config.json"
TO_MEGATRON = """Convert a Hugging Face model to a Megatron-Core torch_dist checkpoint.

The output has what Megatron-LM's --load looks for: release/, the weights alone,
latest_checkpointed_iteration.txt, and hf/, config.json and tokenizer for the way
back. Any layout can load it. --tensor-parallel says to a multiple of what the
vocabulary is filled up with zero rows, --pipeline-parallel over how many files
the layers are spread.
"""
TO_HF = """Convert a checkpoint to a Hugging Face model: safetensors, config.json, tokenizer.

--checkpoint is one of this program's (step-000020, or the output folder of a
run: then its newest), or a torch_dist checkpoint of Megatron-Core: the folder
with .metadata, or Megatron-LM's with latest_checkpointed_iteration.txt. Which
model it is, config.json says: that beside the checkpoint (hf/), or --config's.

--critic converts the critic instead: a model for transformers'
AutoModelForTokenClassification with one label, the value of what precedes the
next token. A checkpoint of a LoRA run has adapters alone: they are merged into
the model that the run started from, or --base where that has moved; --adapter
writes them as PEFT's folder instead, without the model.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, FAILED or MISTAKE."""
    escape_terminal()
    arguments = parse(argv)
    start = time.perf_counter()
    try:
        check_output(arguments.output)
        converted = arguments.convert(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except HubFailedError as error:
        print(error, file=sys.stderr)
        return FAILED
    except (OSError, RuntimeError) as error:
        print(f"{arguments.output} could not be written: {error}", file=sys.stderr)
        return FAILED
    print(converted.line(arguments.output, time.perf_counter() - start))
    return 0


def to_megatron(arguments: argparse.Namespace) -> Converted:
    sizes = (arguments.tensor_parallel, arguments.pipeline_parallel)
    if min(sizes) < 1:
        raise ValueError(
            f"--tensor-parallel and --pipeline-parallel are {sizes}; needed: at least 1."
        )
    source = local_folder(arguments.hf, "--hf")
    shape = read_model_shape(source, "--hf")
    from rlmath.checkpoint.convert.convert import (
        DTYPES,
        hf_to_megatron,
    )  # torch, when nothing is wrong

    return hf_to_megatron(
        source,
        shape,
        arguments.output,
        tensor=arguments.tensor_parallel,
        pipeline=arguments.pipeline_parallel,
        dtype=DTYPES[arguments.dtype],
    )


def to_hf(arguments: argparse.Namespace) -> Converted:
    """Find the checkpoint and its model, and convert it."""
    if not 0 < arguments.shard_gib < float("inf"):
        raise ValueError(f"--shard-gib is {arguments.shard_gib}; needed: a number above 0.")
    source = find_megatron(arguments.checkpoint)
    # Torch, when there is a checkpoint.
    from rlmath.checkpoint.convert.convert import DTYPES, adapters_to_hf, megatron_to_hf
    from rlmath.checkpoint.hf.headers import formats_from_json
    from rlmath.checkpoint.hf.metadata_files import read_metadata_files
    from rlmath.run.recovery.model_card import kept_text

    folder = source.metadata_files
    metadata_files = {} if folder is None else read_metadata_files(folder)
    if arguments.config is not None:
        config = local_folder(arguments.config, "--config", weights=False)
        is_file = config.name == CONFIG
        folder = config.parent if is_file else config
        if not (folder / CONFIG).is_file():
            raise ValueError(
                f"--config {arguments.config}: needed: a {CONFIG}, or a folder that has one."
            )
        config_file = {CONFIG: read_regular(folder / CONFIG, MAX_JSON_BYTES)}
        metadata_files = metadata_files | config_file if is_file else read_metadata_files(folder)
    if folder is None:
        raise ValueError(
            f"{source.state} has no config.json beside it (hf/{CONFIG}), so its model is unknown; "
            "name the folder of the Hugging Face model by --config."
        )
    dtype = DTYPES[arguments.dtype]
    shard_bytes = int(arguments.shard_gib * 2**30)
    run_folder = source.state.parent
    is_ours = (run_folder / PROGRESS).is_file()
    if arguments.adapter:
        card = (
            _card_of(run_folder, read_progress(run_folder).step, is_adapter=True) if is_ours else {}
        )
        return adapters_to_hf(
            source.state, read_model_shape(folder), arguments.output, dtype, card=card
        )
    steps_done = None
    if arguments.critic:
        shape, metadata_files = critic_of(source, metadata_files)
    else:
        shape = read_model_shape(folder)
        if is_ours:
            progress = read_progress(run_folder)
            dtype = dtype or formats_from_json(progress.model_formats)
            steps_done = progress.step
    converted = megatron_to_hf(
        source.state,
        shape,
        metadata_files=metadata_files,
        output=arguments.output,
        dtype=dtype,
        shard_bytes=shard_bytes,
        model=CRITIC if arguments.critic else "",
        base=None if arguments.base is None else local_folder(arguments.base, "--base"),
    )
    if text := kept_text(converted.kept, adapter=None):
        print(f"{arguments.output}: {text}", file=sys.stderr)
    if steps_done is not None:
        for name, card in _card_of(run_folder, steps_done, kept=converted.kept).items():
            write_whole(arguments.output / name, card)
    return converted


def _card_of(
    checkpoint: Path, steps_done: int, is_adapter: bool = False, kept: float = 1.0
) -> dict[str, bytes]:
    """The card of a checkpoint's model, or of its adapters alone, with what its run has measured.

    The model has the share `kept` of what its adapters learned. There is none where the run's
    settings are gone, or are those of another release."""
    from rlmath.run.recovery.model_card import CARD_FILE, model_card

    try:
        run = load_config([checkpoint / SETTINGS], [], saved=True)
    except ValueError:
        return {}
    output_dir = checkpoint.parent.parent
    card = model_card(
        run,
        steps_done,
        total_steps=None,
        output_dir=output_dir,
        is_adapter=is_adapter,
        kept=kept,
        adapter=None,
    )
    return {CARD_FILE: card}


def critic_of(
    source: MegatronSource, metadata_files: dict[str, bytes]
) -> tuple[ModelShape, dict[str, bytes]]:
    """The shape of a checkpoint's critic, and its metadata files.

    These are its own config.json and the policy's tokenizer."""
    path = source.state.parent / CRITIC_CONFIG
    if not path.is_file():
        raise ValueError(
            f"{source.state.parent} has no critic (no {CRITIC_CONFIG}). Leave --critic out."
        )
    return read_critic_shape(path), metadata_files | {CONFIG: read_regular(path, MAX_JSON_BYTES)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="rlmath convert", description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(required=True, metavar="to-megatron | to-hf")
    raw = argparse.RawDescriptionHelpFormatter
    output_help = "folder to make; it must not exist, or be empty"

    add = (
        way := ways.add_parser("to-megatron", description=TO_MEGATRON, formatter_class=raw)
    ).add_argument
    way.set_defaults(convert=to_megatron)
    add(
        "--hf",
        required=True,
        help="folder with config.json and safetensors, or hf://org/name[@revision]",
    )
    add("--output", type=Path, required=True, help=output_help)
    add("--tensor-parallel", type=int, default=1, metavar="N", help="default 1")
    add("--pipeline-parallel", type=int, default=1, metavar="N", help="default 1")
    add("--dtype", choices=FORMATS, default="auto", help="default auto: as in the source")

    add = (way := ways.add_parser("to-hf", description=TO_HF, formatter_class=raw)).add_argument
    way.set_defaults(convert=to_hf)
    add("--checkpoint", type=Path, required=True, help="folder, see above")
    add("--output", type=Path, required=True, help=output_help)
    add(
        "--config",
        help="folder of the Hugging Face model, its config.json alone, or hf://org/name[@revision]",
    )
    group = way.add_mutually_exclusive_group()
    group.add_argument("--critic", action="store_true", help="convert the critic, not the policy")
    group.add_argument(
        "--adapter", action="store_true", help="write the LoRA adapters alone, as PEFT has them"
    )
    group.add_argument(
        "--base", help="folder, or hf:// id, of the model that LoRA adapters are merged into"
    )
    add("--dtype", choices=FORMATS, default="auto", help=AUTO_HELP)
    add("--shard-gib", type=float, default=4.0, help="most GiB of one file (default 4)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
