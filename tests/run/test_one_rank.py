"""The life cycle of a run on one rank, in a forked process: how it ends, and how it goes on."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlmath.checkpoint.directory import complete_checkpoints, read_progress
from rlmath.config.load import load_config
from rlmath.data.micro_batches import training_cost
from rlmath.data.order import Rollback
from rlmath.distributed.fault_tolerance.exit_codes import (
    DIVERGED,
    FINISHED,
    MISTAKE,
    SAVED_AND_STOPPED,
    ExitStatus,
    read_exit_status,
)
from rlmath.distributed.ranks import this_rank
from rlmath.distributed.rendezvous import Rendezvous
from rlmath.run.loop import run_training
from rlmath.run.recovery.rollbacks_file import read_rollbacks
from rlmath.run.startup import prepare_sft
from rlmath.telemetry.reporter import StepRecord
from rlmath.trainer.base import Export
from rlmath.trainer.sft import SftTrainer
from rlmath.workers.user_functions import UserFunctionError
from tests.programs import rows, wait_for

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="autograd has threads for GPUs, which a fork does not have"
)
STEPS = 5
"""Steps of a run, of four to an epoch."""
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def settings(tied_model: Path, tmp_path: Path) -> list[str]:
    """Settings of a run in `tmp_path / "run"`, which learns from eight sums."""
    sums = [f'{{"prompt": "{n}+1=", "completion": "{n + 1}"}}' for n in range(8)]
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(sums))
    return [
        f"model.path={tied_model}",
        f"data.train_path={file}",
        f"run.output_dir={tmp_path / 'run'}",
        f"run.total_steps={STEPS}",
        "run.total_epochs=2",
        "run.device=cpu",
        "data.prompts_per_step=2",
        "sft.held_out_share=0",
        "sft.max_sequence_tokens=64",
        "optimizer.warmup_steps=0",
        "optimizer.decay=constant",
        "save.ckpt_freq_steps=1",
        "save.background=false",
    ]


class Program(SftTrainer):
    """Supervised training to which something happens between steps."""

    events: Events
    asked_to_stop: Callable[[], str | None]

    def begin(
        self, steps_done: int, export: Export, asked_to_stop: Callable[[], str | None]
    ) -> None:
        self.asked_to_stop = asked_to_stop

    def step(self, number: int) -> StepRecord:
        self.events.before_step(self, number + 1)
        record = super().step(number)
        self.events.after_step(self, number + 1)
        return record

    def write_last_step(self, reason: str) -> None:
        self.events.last_steps.append(reason)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.actor.chunks for parameter in chunk.parameters()]


@dataclass
class Events:
    """What happens to a run."""

    before_step: Callable[[Program, int], None] = lambda trainer, step: None
    """Called with the number of the step, from 1, that is made next."""
    after_step: Callable[[Program, int], None] = lambda trainer, step: None
    """Called with the number of the step, from 1, that has just been made."""
    last_steps: list[str] = field(default_factory=list)
    """The reasons for which the last step was written."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: int | None
    """None after an error."""
    error: str
    last_steps: list[str]
    messages: list[tuple[int, str]]
    """Level and text of the lines of its log."""

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.messages]


class Messages(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelno, record.getMessage()))


def run_here(settings: Sequence[str], events: Events) -> Ended:
    """Make a run in this process, which must end soon: threads watch it.

    Its ranks meet in a launcher's store."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(launcher.port))
    torch.set_num_threads(1)
    log = Messages()
    logging.getLogger().addHandler(log)
    Program.events = events
    status = None
    error = ""
    try:
        prepared = prepare_sft(load_config([], settings))
        status = run_training(Program, prepared, Rendezvous(this_rank(), launcher))
    except Exception:
        error = traceback.format_exc()
    return Ended(status, error, events.last_steps, messages=log.messages)


def train(settings: Sequence[str], events: Events | None = None) -> Ended:
    """Make a run in a forked process, to its end or its error."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            sender.send(run_here(settings, events or Events()))
        finally:
            os._exit(0)
    sender.close()
    try:
        return receiver.recv()
    finally:
        os.waitpid(child, 0)


def finish(settings: Sequence[str], events: Events | None = None) -> int | None:
    """The exit status of a run, which no error ends."""
    ended = train(settings, events)
    assert ended.error == ""
    return ended.status


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints, the newest first."""
    return [checkpoint.step for checkpoint in complete_checkpoints(folder / "checkpoints")[0]]


def test_a_run_that_was_stopped_is_the_same_as_one_that_was_not(
    settings: list[str], tmp_path: Path
) -> None:
    def stop(trainer: Program, step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: trainer.asked_to_stop() is not None, seconds=60.0)

    whole = tmp_path / "run"
    stopped = tmp_path / "stopped"
    place = f"run.output_dir={stopped}"
    ended = train(settings)
    assert (ended.status, ended.error) == (FINISHED, "")
    assert read_exit_status(whole) == ExitStatus(FINISHED, f"all {STEPS} steps are done")
    assert [text for level, text in ended.messages if level >= logging.ERROR] == []
    ended = train([*settings, place, "save.ckpt_freq_steps=100"], Events(stop))
    assert (ended.status, ended.error) == (SAVED_AND_STOPPED, "")
    message = "stopped by SIGTERM after step 2, which is saved: the same command resumes after step"
    assert read_exit_status(stopped) == ExitStatus(SAVED_AND_STOPPED, f"{message} 2")
    assert (logging.WARNING, f"The run was {message} 2") in ended.messages
    assert saved_steps(stopped)[0] == 2 and not (stopped / "hf_model").exists()
    assert finish([*settings, place, "save.ckpt_freq_steps=100"]) == FINISHED
    assert [row["step"] for row in rows(stopped)] == list(range(1, STEPS + 1))
    assert rows(stopped) == rows(whole)
    for name in ("model.safetensors", "config.json"):
        assert (stopped / "hf_model" / name).read_bytes() == (
            whole / "hf_model" / name
        ).read_bytes()


def test_a_checkpoint_says_where_the_run_stands_and_what_it_was_made_of(
    settings: list[str], tmp_path: Path
) -> None:
    """The last one is of the second epoch's first step."""
    folder = tmp_path / "run"
    assert finish(settings) == FINISHED
    origin = prepare_sft(load_config([], [*settings, "run.recover_mode=disabled"])).origin
    newest = complete_checkpoints(folder / "checkpoints")[0][0]
    progress = read_progress(newest.folder)
    assert (progress.step, progress.epoch, progress.position) == (STEPS, 1, 2)
    assert (progress.updates, progress.syncs, progress.world_size) == (STEPS, 0, 1)
    assert (progress.discarded_steps, progress.learned_step) == (0, STEPS)
    recorded_origin = (progress.model_fingerprint, progress.data_fingerprint)
    assert recorded_origin == (origin.model, origin.data) and origin.model != origin.data
    assert (progress.reward_fingerprint, progress.hooks_fingerprint) == ("", "")
    assert progress.adapter_fingerprint == ""


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(
    settings: list[str], tmp_path: Path
) -> None:
    def spoil(trainer: Program, step: int) -> None:
        if step == 2:
            trainer.parameters[-1].data.view(-1)[0] = float("nan")

    folder = tmp_path / "run"
    ended = train(settings, Events(after_step=spoil))
    assert (ended.status, ended.error) == (DIVERGED, "")
    error = (
        "there are values that are not finite in the parameters, or the optimizer's state, of the "
        "policy on rank 0"
    )
    assert ended.last_steps == [f"diverged: {error}"]
    assert saved_steps(folder) == [1]
    message = (
        f"diverged in step 2: {error}; the newest checkpoint from before that is "
        f"{folder}/checkpoints/step-000001; rlmath convert to-hf makes a model of it; the same "
        "command resumes after step 1, and would diverge again"
    )
    assert read_exit_status(folder) == ExitStatus(DIVERGED, message)
    assert any(text.startswith(f"The run has {message}. Lower") for text in ended.texts)


def test_steps_that_discard_everything_end_the_run_and_count_when_it_goes_on(
    settings: list[str], tmp_path: Path
) -> None:
    """Nothing is learned after step 2, whose weights give no finite loss."""

    def spoil(trainer: Program, step: int) -> None:
        if step == 2:
            for parameter in trainer.parameters:
                parameter.data.fill_(1e30)

    folder = tmp_path / "run"
    limits = ("run.max_discarded_steps=2", "save.keep_last=1")
    assert finish([*settings, *limits], Events(after_step=spoil)) == DIVERGED
    exit_status = read_exit_status(folder)
    assert exit_status.message.startswith(
        "diverged in step 4: every minibatch of 2 steps in a row was discarded "
        "(run.max_discarded_steps is 2), the last one because "
    )
    assert f"{folder}/checkpoints/step-000001; " in exit_status.message, "the last that learned"
    assert saved_steps(folder) == [3, 1]
    progress = read_progress(folder / "checkpoints" / "step-000003")
    assert (progress.discarded_steps, progress.learned_step) == (1, 2)
    assert finish([*settings, *limits]) == DIVERGED
    assert read_exit_status(folder) == exit_status
    assert finish([*settings, "run.max_discarded_steps=3", "save.keep_last=1"]) == DIVERGED
    assert "diverged in step 5: every minibatch of 3 steps in a" in read_exit_status(folder).message


def test_a_model_that_its_last_step_broke_is_not_exported(
    settings: list[str], tmp_path: Path
) -> None:
    """Its weights are finite, and no later step shows what they give."""
    folder = tmp_path / "run"
    assert finish([*settings, "optimizer.lr=1e30", "run.total_steps=1"]) == DIVERGED
    assert read_exit_status(folder).message == (
        "diverged in step 1: the model gives log-probs that are not finite; no checkpoint is from "
        "before that; the same command resumes after step 1, and would diverge again"
    )
    assert not (folder / "hf_model").exists()


def test_a_run_goes_back_to_its_last_good_checkpoint_with_a_lower_rate_and_other_sequences(
    settings: list[str], tmp_path: Path
) -> None:
    """Weights break once, after step 3; a run that resumes later keeps what was changed."""
    spoiled: list[int] = []

    def spoil(trainer: Program, step: int) -> None:
        if step == 3 and not spoiled:
            spoiled.append(step)
            trainer.parameters[-1].data.view(-1)[0] = float("nan")

    folder = tmp_path / "run"
    back = ("algorithm.rollback=1", "algorithm.rollback_lr_factor=0.25", "optimizer.lr=1e-4")
    ended = train([*settings, *back, "run.total_steps=4"], Events(after_step=spoil))
    assert (ended.status, ended.error) == (FINISHED, "")
    (rollback,) = read_rollbacks(folder)
    assert replace(rollback, reason="") == Rollback(1, 2, 2, diverged_step=3, reason="")
    assert ended.last_steps == [f"diverged: {rollback.reason}"]
    assert "not finite" in rollback.reason
    rates = [row["train/learning_rate"] for row in rows(folder)]
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert rates == pytest.approx([1e-4, 1e-4, 0.25e-4, 0.25e-4])
    assert saved_steps(folder)[:2] == [4, 3]
    progress = read_progress(folder / "checkpoints" / "step-000004")
    assert (progress.rollback_steps, progress.rollback_draw_steps) == ((2,), (2,))
    assert finish([*settings, *back]) == FINISHED
    assert rows(folder)[-1]["train/learning_rate"] == pytest.approx(0.25e-4)


def test_without_a_rollback_left_the_run_diverges(settings: list[str], tmp_path: Path) -> None:
    def spoil(trainer: Program, step: int) -> None:
        if step == 2:
            trainer.parameters[-1].data.view(-1)[0] = float("nan")

    folder = tmp_path / "run"
    ended = train([*settings, "algorithm.rollback=1"], Events(after_step=spoil))
    assert (ended.status, ended.error) == (DIVERGED, "")
    assert [rollback.step for rollback in read_rollbacks(folder)] == [1]
    assert (
        "No rollback after the divergence in step 2: all 1 of algorithm.rollback are made"
        in ended.texts
    )


def test_a_function_of_the_users_that_fails_ends_the_run_with_the_steps_before_it_saved(
    settings: list[str], tmp_path: Path
) -> None:
    def fail(trainer: Program, step: int) -> None:
        if step == 3:
            raise UserFunctionError("mine.py:best fails")

    folder = tmp_path / "run"
    ended = train([*settings, "save.ckpt_freq_steps=100"], Events(fail))
    assert (ended.status, ended.error) == (MISTAKE, "")
    assert ended.last_steps == ["the step after it failed: mine.py:best fails"]
    assert saved_steps(folder)[0] == 2
    message = "ended in step 3, of which nothing was learned: mine.py:best fails"
    assert read_exit_status(folder) == ExitStatus(MISTAKE, message)
    advice = "Correct the function: the same command resumes after step 2"
    assert f"The run has {message}\n{advice}" in ended.texts


def test_an_error_is_logged_at_once_and_the_last_step_is_written(settings: list[str]) -> None:
    def fail(trainer: Program, step: int) -> None:
        raise ValueError("no number")

    ended = train(settings, Events(fail))
    assert ended.status is None and "ValueError: no number" in ended.error
    assert ended.last_steps == ["failed on rank 0: ValueError: no number"]
    (text,) = (text for text in ended.texts if "the run ends" in text)
    assert text.startswith("rank 0 on ") and text.endswith("the run ends: ValueError: no number")


@pytest.mark.parametrize(("rank", "frozen"), [(0, False), (4, True)])
def test_a_run_balances_by_what_its_weights_cost_and_leaves_what_it_learned(
    settings: list[str], tmp_path: Path, rank: int, frozen: bool
) -> None:
    """Weights that do not learn have no gradients to be computed."""

    def compare(trainer: Program, step: int) -> None:
        assert trainer.cost == training_cost(trainer.shape, frozen=frozen)

    run = [*settings, f"lora.rank={rank}", "run.total_steps=1"]
    assert finish(run, Events(compare)) == FINISHED
    model = tmp_path / "run" / "hf_model"
    assert (model / "config.json").is_file() and (model / "tokenizer.json").is_file()
    assert (model / "adapter" / "adapter_config.json").is_file() is frozen
