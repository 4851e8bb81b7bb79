"""The program that trains a model, on every rank.

`torchrun -m rlmath.trainer`, `launch/train_grpo.py` and `launch/train_sft.py` run it.

torchrun --nproc-per-node=N -m rlmath.trainer [grpo | sft] --config x.yaml key.sub=value ...
torchrun --nproc-per-node=N -m rlmath.trainer replay RUN --step 10
python -m rlmath.trainer [grpo | sft] --config x.yaml --dry-run

The steps are in rlmath/trainer/grpo.py and rlmath/trainer/sft.py, replays in
rlmath/replay/replay.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlmath.config.help import raise_problems
from rlmath.config.load import load_config
from rlmath.config.schema import Config, Kind
from rlmath.config.terminal import escape_terminal
from rlmath.distributed.ranks import environment_world_size
from rlmath.planning.checks import only_used, used_keys
from rlmath.run.command_line import launcher_mistake, read_command_line, refuse_launcher
from rlmath.run.early_checks import early_problems

if TYPE_CHECKING:
    from rlmath.run.startup import Program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; its exit status, one of `rlmath.distributed.fault_tolerance.exit_codes`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["replay"]:
        from rlmath.replay.replay import main as replay

        return replay(words[1:])
    is_sft = words[:1] == ["sft"]
    program: Kind = "sft" if is_sft else "grpo"
    if words[:1] == [program]:
        del words[0]
    escape_terminal()
    description = "Train a model with GRPO."
    if is_sft:
        description = (
            "Train a model on written solutions (supervised, cross-entropy on completions)."
        )
    arguments = read_command_line(description, words, used_keys() if is_sft else None)
    if arguments.dry_run:
        # Imported only now: a start has no use for it.
        from rlmath.run.dry_run import dry_run

        return dry_run(
            arguments.config,
            arguments.overrides,
            arguments.ranks,
            kind=program,
            oversubscribe=arguments.oversubscribe,
        )
    load = partial(load_config, arguments.config, arguments.overrides)
    if (mistake := launcher_mistake()) is not None:
        return refuse_launcher(mistake, load, partial(refuse_early, program))
    # Imported only now: help and such mistakes are answered before torch is loaded.
    from rlmath.run.startup import prepare_grpo, prepare_sft, start

    return start(load, prepare_sft if is_sft else prepare_grpo, partial(load_program, is_sft))


def refuse_early(kind: Kind, config: Config) -> None:
    """ValueError for what the settings and the names of files show to be wrong."""
    used = only_used(config)[0] if kind == "sft" else config
    problems, _ = early_problems(used, environment_world_size(), kind)
    raise_problems("this run", problems)


def load_program(is_sft: bool) -> Program:
    # Imported only now: a mistake is reported before Megatron and vLLM are loaded.
    from rlmath.run.loop import run_training

    if is_sft:
        from rlmath.trainer.sft import SftTrainer

        return partial(run_training, SftTrainer)
    from rlmath.trainer.grpo import GrpoTrainer

    return partial(run_training, GrpoTrainer)
