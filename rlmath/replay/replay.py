"""Make a captured step of a run again (`rlmath replay`), and compare.

It is its update from the recorded samples, or its samples and rewards from the weights that it
began with. Nothing that is imported here loads Megatron or vLLM."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.algorithms.prompt_history import PromptHistory
from rlmath.checkpoint.capture import (
    CAPTURE_FILE,
    GROUPS_FILE,
    Capture,
    check_route_files,
    folder_of,
    read_capture,
)
from rlmath.checkpoint.directory import complete_checkpoints, read_progress
from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.config.load import load_config
from rlmath.config.run_files import CAPTURES_FOLDER, CHECKPOINTS_FOLDER, CONFIG_FILE
from rlmath.config.schema import (
    Config,
    RolloutConfig,
    TelemetryConfig,
    ToolsConfig,
    ValidationConfig,
)
from rlmath.config.terminal import escape_terminal
from rlmath.data.dataset import Inputs
from rlmath.data.order import PromptOrder
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import load_tokenizer
from rlmath.data.tool_chats import run_chat_settings
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.planning.checks import check_replay
from rlmath.planning.memory_estimate import mesh_of
from rlmath.rewards.several_rewards import functions_of
from rlmath.run.command_line import launcher_mistake, mistakes_end_all_ranks, refuse_launcher
from rlmath.run.recovery.resume import CheckpointToResume, Origin

if TYPE_CHECKING:
    from rlmath.run.prepared import PreparedRun
    from rlmath.run.startup import Program

PARTS = ("update", "rollout")
TOLERANCE = 1e-4
"""Largest relative difference that counts as the same.

The norm of a gradient differs by up to 1e-5 on another layout in float32; means over tokens by
1e-7."""
REPLAYS = "replays"
"""Folder in a capture's folder, with a folder for each part and layout."""

DESCRIPTION = """Make a captured step of a run again, and compare.

rlmath replay RUN --step 10
rlmath replay RUN --step 10 --ranks 4 parallel.tensor=2 parallel.pipeline=2
rlmath replay RUN --step 10 --part rollout

RUN is a run's folder, or one of its captures (telemetry.capture_steps).
Settings behind it, such as another layout or another place of the model, take
the place of the run's. Exit status 0: the same within the tolerance; 1: it is
not; 2: a mistake; 3: nothing was compared, as the step made no update.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns one of `rlmath.distributed.fault_tolerance.exit_codes`.

    It is FAILURE also where the replay differs, NOTHING_COMPARED where there is nothing to
    compare."""
    escape_terminal()
    with mistakes_end_all_ranks():
        arguments = parse(argv)
    replay = Replay(arguments)
    if (mistake := launcher_mistake()) is not None:
        return refuse_launcher(mistake, replay.load, lambda settings: None)
    from rlmath.run.startup import (
        start,
    )  # only now: help and a mistake are answered before torch is loaded

    return start(replay.load, replay.prepare, replay.program)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="rlmath replay",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder, or that of a capture")
    add("overrides", nargs="*", metavar="section.key=value", help="settings that are to differ")
    add("--step", type=int, help="counted from 1; default: the only one that is captured")
    add("--part", choices=PARTS, default="update", help="what is made again (default update)")
    add("--state", type=Path, help="checkpoint to start from (default: that of the run)")
    add(
        "--output", type=Path, help=f"where it writes (default: {REPLAYS}/ in the capture's folder)"
    )
    functions_help = "with --part rollout: import the functions that the capture's settings name"
    add("--with-functions", action="store_true", help=functions_help)
    tolerance_help = f"largest relative difference that counts as the same (default {TOLERANCE:g})"
    add("--tolerance", type=float, default=TOLERANCE, help=tolerance_help)
    add(
        "--ranks",
        type=int,
        help="processes (default: as many as the run had); of `rlmath replay` only",
    )
    arguments = parser.parse_intermixed_args(argv)
    if not (math.isfinite(arguments.tolerance) and arguments.tolerance >= 0):
        parser.error(f"--tolerance is {arguments.tolerance}; needed: a number from 0 on")
    return arguments


def find_capture(run: Path, step: int | None) -> Path:
    """The folder of a capture: `run`, or a step (from 1) of it.

    ValueError for none, or several without a `step`."""
    try:
        if (run / CAPTURE_FILE).is_file():
            return run
        capture_folders = sorted(
            path.parent for path in (run / CAPTURES_FOLDER).glob(f"step-*/{CAPTURE_FILE}")
        )
    except OSError as error:
        raise ValueError(f'"{run}" cannot be read: {error.strerror}') from error
    matches = [
        folder for folder in capture_folders if step is None or folder == folder_of(run, step - 1)
    ]
    if len(matches) != 1:
        problem = (
            "several captures"
            if matches
            else "no capture"
            if step is None
            else f"no capture of step {step}"
        )
        raise ValueError(
            f'"{run}" has {problem}; captures there: '
            f"{', '.join(folder.name for folder in capture_folders) or 'none'}. Give the folder of "
            "a run that telemetry.capture_steps or a failure made one in, and --step N"
        )
    return matches[0]


def find_state(
    folder: Path, capture: Capture, checkpoint_folder: Path | None
) -> tuple[CheckpointToResume | None, str]:
    """The checkpoint that the step began with, and a warning where it is an earlier one.

    The checkpoint is None for the model that the run started from. ValueError where there is none.
    """
    if checkpoint_folder is not None:
        place = checkpoint_folder.resolve()
        checkpoints, notes = complete_checkpoints(place.parent)
        checkpoints = [
            checkpoint for checkpoint in checkpoints if checkpoint.folder.name == place.name
        ]
    elif capture.step == 0:
        return None, ""
    else:
        checkpoints, notes = complete_checkpoints(
            folder.absolute().parent.parent / CHECKPOINTS_FOLDER
        )
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.step <= capture.step]
    if not checkpoints:
        needed = (
            checkpoint_folder
            or folder.parent.parent / CHECKPOINTS_FOLDER / f"step-{capture.step:06d}"
        )
        raise ValueError(
            f'there is no complete checkpoint "{needed}", with which step {capture.step + 1} '
            "began. "
            f"{' '.join([*notes, 'Give one: --state FOLDER'])}"
        )
    checkpoint = checkpoints[0]
    progress = read_progress(checkpoints[0].folder)
    warning = ""
    if checkpoint.step != capture.step or len(progress.rollback_steps) > capture.rollbacks:
        warning = (
            f"the replay of step {capture.step + 1} starts from {checkpoint.folder}, and the step "
            "began with other "
            f"weights, those after step {capture.step}: figures differ"
        )
    return (checkpoint, progress), warning


def replay_settings(settings: Config, output: Path, part: str) -> Config:
    """A run's settings without what a replay of a step does not use, with a folder in `output`."""
    layout = settings.parallel
    ranks = environment_world_size()
    name = f"{part}-{ranks}-ranks-tp{layout.tensor}-pp{layout.pipeline}"
    rollout = settings.rollout
    if part == "update":  # there is no engine
        rollout = replace(rollout, ranks=0, tail="wait", tensor_parallel=1)
    return replace(
        settings,
        rollout=rollout,
        run=replace(settings.run, output_dir=str(output / name), recover_mode="disabled"),
        data=replace(
            settings.data,
            train_path=GROUPS_FILE,  # never read
            more_train_paths=[],
            train_weights=[],
            history_path=None,
        ),
        validation=ValidationConfig(),
        telemetry=TelemetryConfig(tensorboard=False, report=False),
        save=replace(settings.save, push_to_hub=None),
    )


class Replay:
    """The command on this rank: what `startup.start` needs of a program."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    def load(self) -> Config:
        """The settings of the capture, and of the command line.

        ValueError for what is damaged or not there."""
        self.folder = find_capture(self.arguments.run, self.arguments.step)
        self.capture = read_capture(self.folder)
        self.state, self.warning = find_state(self.folder, self.capture, self.arguments.state)
        settings = load_config([self.folder / CONFIG_FILE], self.arguments.overrides, saved=True)
        if self.arguments.part == "rollout":
            if settings.answers_turns:
                raise ValueError(
                    "turns.feedback or environment.function is set, and a replay answers no turns: "
                    "the rollout cannot be made again. --part update can"
                )
            self._check_rollout(settings.rollout, settings.tools)
            self._check_functions(settings)
        return replay_settings(
            settings, self.arguments.output or self.folder / REPLAYS, self.arguments.part
        )

    def _check_functions(self, settings: Config) -> None:
        """Refuse functions without --with-functions: the capture says which code is imported."""
        named = [*settings.run.plugins, *functions_of(settings.reward).values()]
        if named and not self.arguments.with_functions:
            raise ValueError(
                f"{self.folder / CONFIG_FILE} names functions, which this replay would import: "
                f"{', '.join(named)}. "
                "If you trust them, add --with-functions"
            )

    def _check_rollout(self, rollout: RolloutConfig, tools: ToolsConfig) -> None:
        """Refuse a step whose rollout cannot be made again."""
        if tools.format is not None:
            raise ValueError(
                f'tools.format is "{tools.format}", and a replay runs no code of a model\'s: the '
                "rollout cannot be made again. --part update can"
            )
        completions = [
            completion for group in self.capture.groups for completion in group.completions
        ]
        steps = {segment.step for completion in completions for segment in completion.segments}
        if rollout.ranks or rollout.tail != "wait" or steps - {self.capture.step}:
            raise ValueError(
                f"step {self.capture.step + 1} learned from completions that were drawn in, or "
                "carried through, other "
                "steps (rollout.tail, rollout.ranks): its rollout cannot be made again. --part "
                "update can"
            )
        if self.warning:
            raise ValueError(f"{self.warning}. The rollout needs those of the step")

    def prepare(self, config: Config) -> PreparedRun[Inputs]:
        """Prepare the replay; ValueError for all that can be known to be wrong before it starts."""
        from rlmath.run.prepared import PreparedRun

        world_size = environment_world_size()
        checked = check_replay(
            config,
            world_size,
            samples=self.arguments.part == "rollout",
            has_routes=self.capture.has_routes,
        )
        if self.arguments.part == "update" and config.policy.routing_replay == "engine":
            check_route_files(self.capture, environment_rank(), world_size)
        shapes = checked.with_total_steps(config, self.capture.total_steps)
        shape = shapes.policy
        stages = shapes.length_stages
        if self.capture.length_stage >= len(stages):
            raise ValueError(
                f"{self.folder} is of length stage {self.capture.length_stage + 1}, and the "
                f"settings have {len(stages)}"
            )
        tokenizer = load_tokenizer(config.model.path, settings=run_chat_settings(config))
        groups = self.capture.groups
        tokens = [group.prompt.token_ids for group in groups]
        tokens += [completion.token_ids for group in groups for completion in group.completions]
        if any(not 0 <= token < shape.vocab_size for row in tokens for token in row):
            raise ValueError(
                f"{self.folder} has tokens that are not below {shape.vocab_size}, those of "
                "model.path"
            )
        prompts = [group.prompt for group in groups]
        inputs = Inputs(
            prompts=prompts,
            order=PromptOrder(
                max(1, len(prompts)), max(1, len(prompts)), config.run.seed, shuffle=False
            ),
            total_steps=self.capture.total_steps,
            reports=(),
            history=PromptHistory(config.data.history_groups),
            history_line="",
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(config.model.path, tokenizer, shape.vocab_size),
        )
        origin = Origin(model_fingerprint(config.model.path), "")
        source = "model.path" if self.state is None else str(self.state[0].folder)
        mesh = mesh_of(config.parallel, config.rollout, world_size, rank=0)
        lines = (
            f"Replay of the {self.arguments.part} of step {self.capture.step + 1}, captured on "
            f"{self.capture.layout}: from "
            f"{source}, on {mesh.training_layout}",
        )
        return PreparedRun(
            config,
            shapes,
            inputs=inputs,
            origin=origin,
            recovery=None,
            lines=lines,
            validation=(),
            warnings=tuple(filter(None, [self.warning])),
        )

    def program(self) -> Program:
        """The program, imported only now: mistakes are reported before Megatron and vLLM load."""
        from rlmath.replay import replay_step

        part = (
            replay_step.replay_rollout
            if self.arguments.part == "rollout"
            else replay_step.replay_update
        )
        return partial(part, self.capture, self.state, self.arguments.tolerance)


if __name__ == "__main__":
    sys.exit(main())
