"""What a replay of a step begins with, what it refuses, and what it says at its end."""

from __future__ import annotations

import json
import logging
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.algorithms.types import Score
from rlmath.checkpoint.capture import (
    CapturedMinibatch,
    CapturedUpdate,
    folder_of,
    write_capture,
)
from rlmath.checkpoint.convert.convert import adapters_to_hf, megatron_to_hf
from rlmath.checkpoint.directory import (
    Checkpoint,
    Progress,
    complete_checkpoints,
    finish_partial,
    open_partial,
    partial_of,
    write_progress,
)
from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.config.load import config_as_yaml, load_config
from rlmath.config.schema import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ToolsConfig,
)
from rlmath.distributed.device import Device
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    NOTHING_COMPARED,
    read_exit_status,
)
from rlmath.distributed.mesh import Mesh
from rlmath.replay.replay import Replay, find_state, parse, replay_settings
from rlmath.replay.replay_step import (
    ReplayTrainer,
    _end,
    _policy_folders,
    _whole,
    compare,
    compare_groups,
    comparison_lines,
    rollout_line,
)
from tests.checkpoint.conversions import ALPHA, RANK, assert_same, lora_checkpoint, weights
from tests.replay.test_capture import a_capture
from tests.tiny_models import shape_of

MESH = Mesh(0, 1, 1, pipeline=1, engine_size=1)
DEVICE = Device("cpu", torch.device("cpu"), "gloo", torch.float32)


def write_checkpoint(run: Path, step: int, rollback_steps: tuple[int, ...] = ()) -> Path:
    """A complete checkpoint without tensors."""
    partial = open_partial(run / "checkpoints", step)
    (partial / "state" / ".metadata").write_bytes(b"")
    (partial / "config.yaml").write_text("")
    progress = Progress(
        step,
        epoch=0,
        position=0,
        updates=step,
        syncs=step,
        layout="TP1",
        world_size=1,
        optimizer_tensors=(),
        random_states=(),
        model_fingerprint="",
        data_fingerprint="",
        versions={},
        rollback_steps=rollback_steps,
    )
    write_progress(partial, progress)
    return finish_partial(partial, step, kept=False, known={}).folder


def test_a_step_begins_with_the_newest_checkpoint_before_it(tmp_path: Path) -> None:
    capture = replace(a_capture(), step=2)
    folder = folder_of(tmp_path, 2)
    first, second, third = (write_checkpoint(tmp_path, step) for step in (1, 2, 3))
    state, warning = find_state(folder, capture, None)
    assert state is not None and state[0].folder == second and state[1].step == 2
    assert not warning
    assert find_state(folder, replace(capture, step=0), None) == (None, "")
    for checkpoint_folder in (first, third):
        state, warning = find_state(folder, capture, checkpoint_folder)
        assert state is not None and state[0].folder == checkpoint_folder
        text = (
            f"the replay of step 3 starts from {checkpoint_folder}, and the step began with other"
        )
        assert warning.startswith(text) and "those after step 2:" in warning
    shutil.rmtree(second)
    state, warning = find_state(folder, capture, None)
    assert state is not None and state[0].folder == first and warning


def test_a_checkpoint_of_after_a_rollback_is_not_that_of_before(tmp_path: Path) -> None:
    capture = replace(a_capture(), step=2)
    write_checkpoint(tmp_path, 2, rollback_steps=(1,))
    folder = folder_of(tmp_path, 2)
    assert "figures differ" in find_state(folder, capture, None)[1]
    assert not find_state(folder, replace(capture, rollbacks=1), None)[1]


def test_each_part_and_layout_of_a_replay_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay learns from the capture alone, and leaves the run as it is."""
    monkeypatch.setenv("WORLD_SIZE", "6")
    settings = Config(
        run=RunConfig(output_dir="run", seed=7, recover_mode="auto"),
        data=DataConfig(
            train_path="first",
            more_train_paths=["second"],
            train_weights=[1.0, 2.0],
            template="raw",
        ),
        parallel=ParallelConfig(tensor=2, pipeline=3),
        rollout=RolloutConfig(ranks=2, tail="carry", tensor_parallel=2, temperature=0.7),
    )
    update = replay_settings(settings, tmp_path, "update")
    assert update.run == RunConfig(
        output_dir=f"{tmp_path}/update-6-ranks-tp2-pp3", seed=7, recover_mode="disabled"
    )
    rollout = update.rollout
    assert (rollout.ranks, rollout.tail, rollout.tensor_parallel) == (0, "wait", 1)
    assert rollout.temperature == 0.7
    assert (update.data.more_train_paths, update.data.train_weights) == ([], [])
    assert update.data.template == "raw" and update.data.train_path != "first"
    assert not update.telemetry.tensorboard and not update.telemetry.report
    sampled = replay_settings(settings, tmp_path, "rollout")
    assert sampled.run.output_dir == f"{tmp_path}/rollout-6-ranks-tp2-pp3"
    assert sampled.rollout == settings.rollout


def captured_run(run_folder: Path, step: int = 1, drawn_in: int = 1, **sections: Any) -> Path:
    """The folder of the capture of a step, counted from 0, by a run with these settings."""
    config = Config(
        run=sections.pop("run", RunConfig(output_dir=str(run_folder))),
        model=ModelConfig("m"),
        data=DataConfig(train_path="t"),
        **sections,
    )
    groups = [
        replace(
            group,
            completions=tuple(
                replace(
                    completion,
                    segments=tuple(
                        replace(segment, step=drawn_in) for segment in completion.segments
                    ),
                )
                for completion in group.completions
            ),
        )
        for group in a_capture().groups
    ]
    capture = replace(a_capture(), step=step, settings_yaml=config_as_yaml(config), groups=groups)
    folder = write_capture(run_folder, capture)
    assert folder is not None
    return folder


def loaded(words: Sequence[object]) -> Config:
    """The settings of a replay with these words on its command line."""
    return Replay(parse([str(word) for word in words])).load()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tools": ToolsConfig(format="fence")}, 'tools.format is "fence", and a replay runs no'),
        (
            {"rollout": RolloutConfig(tail="carry")},
            "step 2 learned from completions that were drawn",
        ),
        ({"rollout": RolloutConfig(ranks=1)}, "step 2 learned from completions that were drawn"),
        ({"drawn_in": 0}, "step 2 learned from completions that were drawn"),
        (
            {"reward": RewardConfig(function="own.py:f")},
            "names functions.*own.py:f.*with-functions",
        ),
        (
            {"run": RunConfig(output_dir="out", plugins=["own.py"])},
            "names functions.*own.py.*--with-functions",
        ),
    ],
)
def test_a_rollout_that_cannot_be_made_again_is_refused(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    """The update can be made again all the same: it samples nothing and imports nothing."""
    write_checkpoint(tmp_path, 1)
    folder = captured_run(tmp_path, **sections)
    with pytest.raises(ValueError, match=message):
        loaded([folder, "--part", "rollout"])
    assert Path(loaded([folder]).run.output_dir).parent == folder / "replays"


def test_a_rollout_is_made_again_from_the_checkpoint_of_its_step_alone(tmp_path: Path) -> None:
    """Settings on the command line take the place of the run's, functions are asked for."""
    other = write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 1)
    folder = captured_run(tmp_path, reward=RewardConfig(function="own.py:f"))
    words = [folder, "--part", "rollout", "--with-functions", "rollout.temperature=0.5"]
    settings = loaded([*words, "--output", tmp_path / "out"])
    assert settings.rollout.temperature == 0.5 and settings.reward.function == "own.py:f"
    assert Path(settings.run.output_dir).parent == tmp_path / "out"
    with pytest.raises(ValueError, match=r"starts from .*The rollout needs those of the step"):
        loaded([*words, "--state", other])
    assert loaded([folder, "--state", other]).run.output_dir
    assert loaded([tmp_path, "--step", 2]).run.output_dir


def prepared_replay(run: Path, model: Path, words: Sequence[object] = (), **changes: Any) -> Any:
    """What is prepared of the replay of a small run's captured step."""
    settings = ["data.max_prompt_tokens=16", "rollout.max_new_tokens=32", "run.device=cpu"]
    settings += ["policy.max_tokens_per_microbatch=64", "data.train_path=t"]
    settings += [f"run.output_dir={run}", f"model.path={model}"]
    settings_yaml = config_as_yaml(load_config([], settings))
    folder = write_capture(run, replace(a_capture(), settings_yaml=settings_yaml, **changes))
    replay = Replay(parse([str(word) for word in (folder, *words)]))
    return replay.prepare(replay.load())


def test_an_update_with_the_engines_experts_cannot_be_made_again_without_them(
    tied_model: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, 1)
    with pytest.raises(
        ValueError, match=r"the capture has no routes: only .*\. Set policy\.routing_replay=none"
    ):
        prepared_replay(tmp_path, tied_model, ["policy.routing_replay=engine"])


def test_a_replay_learns_from_the_groups_and_the_steps_of_the_capture(
    tied_model: Path, tmp_path: Path
) -> None:
    checkpoints = [write_checkpoint(tmp_path, step) for step in (1, 2)]
    prepared = prepared_replay(tmp_path, tied_model)
    assert prepared.inputs.prompts == [group.prompt for group in a_capture().groups]
    assert prepared.inputs.total_steps == a_capture().total_steps
    assert prepared.inputs.stop_token_ids == (1,)
    assert prepared.origin.model == model_fingerprint(tied_model)
    (line,) = prepared.lines
    text = "Replay of the update of step 2, captured on TP1 x PP1 x DP1: from "
    assert line == f"{text}{checkpoints[0]}, on TP1 x PP1 x DP1"
    assert prepared.warnings == ()
    shutil.rmtree(tmp_path / "captures")
    (warning,) = prepared_replay(tmp_path, tied_model, ["--state", checkpoints[1]]).warnings
    assert f"starts from {checkpoints[1]}" in warning
    shutil.rmtree(tmp_path / "captures")
    (line,) = prepared_replay(tmp_path, tied_model, step=0).lines
    assert line.startswith(f"{text.replace('step 2', 'step 1')}model.path, on ")


def test_a_replay_has_the_chat_template_of_its_settings(tied_model: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}~{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    words = [f"data.chat_template={tmp_path}/own.jinja"]
    prepared = prepared_replay(tmp_path, tied_model, words, step=0)
    assert prepared.inputs.tokenizer.chat_template == template


def test_a_capture_of_other_lengths_or_another_models_tokens_is_refused(
    tied_model: Path, tmp_path: Path
) -> None:
    """The model has the tokens 0 to 100."""
    first, second = a_capture().groups
    with pytest.raises(ValueError, match="is of length stage 2, and the settings have 1"):
        prepared_replay(tmp_path / "later", tied_model, step=0, length_stage=1)
    for token, is_refused in ((0, False), (100, False), (101, True), (-1, True)):
        completion = replace(first.completions[0], token_ids=array("i", [5, token]))
        groups = [replace(first, completions=(completion, first.completions[1])), second]
        run = tmp_path / str(token)
        if is_refused:
            with pytest.raises(ValueError, match="has tokens that are not below 101"):
                prepared_replay(run, tied_model, step=0, groups=groups)
        else:
            assert prepared_replay(run, tied_model, step=0, groups=groups).inputs.prompts
    groups = [first, replace(second, prompt=replace(second.prompt, token_ids=(5, 101)))]
    with pytest.raises(ValueError, match="has tokens that are not below 101"):
        prepared_replay(tmp_path / "prompt", tied_model, step=0, groups=groups)


def minibatch(loss: float, discarded: str | None = None) -> CapturedMinibatch:
    numbers = {"loss": loss, "tokens": 4.0, "grad_norm": 1.0, "mismatch_max": 0.5}
    return CapturedMinibatch(numbers, discarded)


def test_the_critics_minibatches_are_compared_as_the_policys_are() -> None:
    update = CapturedUpdate(
        [minibatch(1.0), minibatch(2.0)], [minibatch(3.0)], [[0.5, -0.5], [1.0]], "ab"
    )
    capture = replace(a_capture(), update=update)
    unchanged = compare(capture, "ab", update)
    assert unchanged.minibatches == 3 and unchanged.bit_equal
    assert {difference.minibatch for difference in unchanged.differences} == {
        "1",
        "2",
        "critic 1",
        "all",
    }
    critic = compare(capture, "ab", replace(update, critic_minibatches=[minibatch(3.4)]))
    assert not critic.same(0.09) and critic.same(0.11)
    *_, last = comparison_lines(capture, critic, update, 0.11)
    assert last == (
        "The same: the largest relative difference is 1.0e-01, loss of minibatch critic 1; "
        "allowed: 0.11; weights afterwards: equal"
    )
    assert comparison_lines(capture, critic, update, 0.01)[-1].startswith("NOT the same: the")
    assert comparison_lines(capture, unchanged, update, 0.0)[-1].startswith(
        "The same to the bit: the"
    )
    fewer = compare(capture, "ab", replace(update, critic_minibatches=[]))
    assert fewer.mistakes == ("critic_minibatches: 1 captured, 0 replayed",)
    assert f"  {fewer.mistakes[0]}" in comparison_lines(capture, fewer, update, 1.0)


def test_a_number_is_compared_with_the_size_that_it_has() -> None:
    """Sums with the number of tokens, a token's mismatch with 1, other numbers with themselves."""
    update = CapturedUpdate([minibatch(1.0)], [], [[0.5, -0.5], [1.0]], "ab")
    numbers = {"loss": 1.1, "tokens": 4.0, "grad_norm": 1.25, "mismatch_max": 0.6}
    replayed = replace(update, minibatches=[CapturedMinibatch(numbers, None)])
    comparison = compare(replace(a_capture(), update=update), "ab", replayed)
    relative = {difference.name: difference.relative for difference in comparison.differences}
    assert relative == pytest.approx(
        {"loss": 0.1 / 4, "tokens": 0, "grad_norm": 0.2, "mismatch_max": 0.1, "advantage": 0}
    )


def test_a_run_that_ended_in_the_update_began_it_with_weights_all_the_same() -> None:
    update = CapturedUpdate([minibatch(1.0)], [], [[0.5, -0.5], [1.0]], "ab")
    capture = replace(a_capture(), update=None)
    first, last = comparison_lines(capture, compare(capture, "cd", update), update, 1.0)
    assert first == "The weights before the step, beside the captured ones: other"
    assert last.startswith("NOT the same: ")


def test_the_lines_show_the_numbers_of_each_minibatch() -> None:
    update = CapturedUpdate([minibatch(1.0), minibatch(2.0)], [], [[0.5, -0.5], [1.0]], "ab")
    capture = replace(a_capture(), update=update)
    replayed = replace(update, minibatches=[minibatch(1.0), minibatch(2.5)], weights_after="cd")
    lines = comparison_lines(capture, compare(capture, "ab", replayed), replayed, 0.2)
    assert lines[0] == "The weights before the step, beside the captured ones: equal"
    words_of_lines = [line.split() for line in lines[1:-1]]
    assert [words[1:3] for words in words_of_lines] == [
        [number, name] for number in "12" for name in ("loss", "tokens", "grad_norm")
    ]
    assert words_of_lines[3][3:] == ["2", "2.5", "1.2e-01"]
    assert lines[-1].startswith("The same: the") and lines[-1].endswith("afterwards: other")


@pytest.mark.parametrize(
    ("captured", "replayed", "is_mistake"),
    [("a", "b", False), ("a", None, True), (None, "a", True), (None, None, False)],
)
def test_a_minibatch_that_is_discarded_in_one_of_the_two_only_is_a_mistake(
    captured: str | None, replayed: str | None, is_mistake: bool
) -> None:
    update = CapturedUpdate([minibatch(1.0, captured)], [], [[0.5, -0.5], [1.0]], "ab")
    other = replace(update, minibatches=[minibatch(1.0, replayed)])
    comparison = compare(replace(a_capture(), update=update), "ab", other)
    assert bool(comparison.mistakes) == is_mistake
    assert comparison.status(1.0) == (FAILURE if is_mistake else FINISHED)


def test_weights_that_were_not_captured_are_no_difference() -> None:
    update = CapturedUpdate([minibatch(1.0)], [], [[0.5, -0.5], [1.0]], None)
    capture = replace(a_capture(), update=update, weights_before=None)
    comparison = compare(capture, "ab", replace(update, weights_after="ab"))
    assert comparison.start == comparison.weights == "not captured"
    assert comparison.same(0.0) and not comparison.bit_equal


def test_completions_of_a_rollout_are_compared_one_by_one() -> None:
    """Log-probs are compared where all tokens are the same."""
    first, second = a_capture().groups
    moved, other_tokens = first.completions
    completions = (
        replace(moved, logprobs=[-0.1, -0.45]),
        replace(other_tokens, token_ids=[9], logprobs=[-5.0]),
    )
    replayed = [replace(first, completions=completions), second]
    comparison = compare_groups([first, second], replayed)
    assert (comparison.completions, comparison.same_tokens, comparison.same_rewards) == (4, 3, 4)
    assert comparison.logprobs_apart == pytest.approx(0.25)
    assert comparison.status == FAILURE and not comparison.same
    wrong = Score(0.0, False, "2", "number")
    scores = [first, replace(second, scores=(wrong, second.scores[1]))]
    comparison = compare_groups([first, second], scores)
    assert (comparison.same_tokens, comparison.same_rewards, comparison.status) == (4, 3, FAILURE)
    assert rollout_line(comparison) == (
        "4 of 4 completions have the same tokens, 3 the same reward; log-probs of the same tokens "
        "are apart by at most 0.0e+00 nats"
    )


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (FINISHED, "the replay is the same"),
        (FAILURE, "the replay is not the same"),
        (NOTHING_COMPARED, "nothing was compared"),
    ],
)
def test_the_end_of_a_replay_is_in_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int, text: str
) -> None:
    caplog.set_level(logging.INFO)
    prepared: Any = SimpleNamespace(config=Config(run=RunConfig(output_dir=str(tmp_path))))
    assert _end(prepared, status, {"part": "update"}, lines=["first", "second"]) == status
    assert caplog.messages[:2] == ["first", "second"]
    assert json.loads((tmp_path / "replay.json").read_text()) == {"part": "update"}
    exit_status = read_exit_status(tmp_path)
    assert (exit_status.status, exit_status.message) == (status, text)


@pytest.mark.parametrize("has_critic", [False, True])
def test_the_learning_rate_is_as_low_as_the_rollbacks_before_the_step_left_it(
    has_critic: bool,
) -> None:
    learners = [SimpleNamespace(lr_scale=1.0), SimpleNamespace(lr_scale=1.0)]
    actor, critic = (SimpleNamespace(learner=learner) for learner in learners)
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(algorithm=SimpleNamespace(rollback_lr_factor=0.5)),
        capture=replace(a_capture(), rollbacks=3),
        actor=actor,
        critic=critic if has_critic else None,
    )
    ReplayTrainer.scale_learning_rate(trainer)
    assert [learner.lr_scale for learner in learners] == [0.125, 0.125 if has_critic else 1.0]


# ---------------------------------------------------------------- the policy on disk


@pytest.fixture(scope="module")
def lora_state(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The checkpoint of a LoRA run after its first step."""
    root = tmp_path_factory.mktemp("lora") / "checkpoints"
    lora_checkpoint(untied_model, partial_of(root, 1))
    finish_partial(partial_of(root, 1), 1, kept=False, known={})
    (checkpoint,) = complete_checkpoints(root)[0]
    return checkpoint


def prepared_of(model: Path, output: Path, **settings: Any) -> Any:
    """What a replay of a run that began with a model has prepared, as far as it is asked here."""
    adapter = settings.pop("adapter", None)
    config = Config(
        run=RunConfig(output_dir=str(output)),
        model=ModelConfig(str(model), None if adapter is None else str(adapter)),
        lora=LoraConfig(RANK, ALPHA, **settings),
    )
    return SimpleNamespace(config=config, shapes=SimpleNamespace(policy=shape_of(model)))


@pytest.mark.usefixtures("process_group")
def test_a_rollouts_policy_is_the_checkpoints_as_the_runs_engines_had_it(
    untied_model: Path, lora_state: Checkpoint, tmp_path: Path
) -> None:
    """The engines have adapters beside the model, or merged into it."""
    state: Any = (lora_state, None)
    shape = shape_of(untied_model)
    beside = _policy_folders(prepared_of(untied_model, tmp_path / "a"), state, MESH, device=DEVICE)
    assert (beside.model, beside.adapter) == (untied_model, tmp_path / "a" / "model")
    adapters_to_hf(lora_state.state, shape, tmp_path / "adapters", dtype=None, card={})
    name = "adapter_model.safetensors"
    expected = (tmp_path / "adapters" / name).read_bytes()
    assert (tmp_path / "a" / "model" / name).read_bytes() == expected
    merged = prepared_of(untied_model, tmp_path / "b", engine="merged")
    policy = _policy_folders(merged, state, MESH, device=DEVICE)
    assert (policy.model, policy.adapter) == (tmp_path / "b" / "model", None)
    whole = tmp_path / "whole"
    metadata_files = read_metadata_files(untied_model)
    megatron_to_hf(lora_state.state, shape, metadata_files, output=whole, dtype=None)
    assert_same(weights(policy.model), weights(whole))


@pytest.mark.usefixtures("process_group")
def test_the_policy_of_the_first_step_is_what_the_run_began_with(
    untied_model: Path, lora_state: Checkpoint, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    shape = shape_of(untied_model)
    adapters_to_hf(lora_state.state, shape, adapter, dtype=None, card={})
    for given_adapter, settings, expected in (
        (None, {}, (untied_model, None)),
        (None, {"engine": "merged"}, (untied_model, None)),
        (adapter, {}, (untied_model, adapter)),
        (adapter, {"engine": "merged"}, (tmp_path / "out" / "model", None)),
    ):
        prepared = prepared_of(untied_model, tmp_path / "out", adapter=given_adapter, **settings)
        policy = _policy_folders(prepared, None, MESH, device=DEVICE)
        assert (policy.model, policy.adapter) == expected
    whole = tmp_path / "whole"
    metadata_files = read_metadata_files(untied_model)
    megatron_to_hf(lora_state.state, shape, metadata_files, output=whole, dtype=None)
    assert_same(weights(tmp_path / "out" / "model"), weights(whole))


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_that_cannot_be_converted_is_a_mistake(
    untied_model: Path, lora_state: Checkpoint, tmp_path: Path
) -> None:
    empty = replace(lora_state, folder=tmp_path / "nothing")
    (tmp_path / "nothing" / "state").mkdir(parents=True)
    prepared = prepared_of(untied_model, tmp_path / "out")
    state: Any = (empty, None)
    with pytest.raises(ValueError, match="nothing"):
        _policy_folders(prepared, state, MESH, device=DEVICE)


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_is_read_whole_before_it_is_used(tmp_path: Path) -> None:
    phases: list[str] = []
    heartbeat: Any = SimpleNamespace(enter_phase=phases.append, report_progress=lambda: None)
    assert _whole(None, heartbeat) is None
    folder = write_checkpoint(tmp_path, 1)
    state, _ = find_state(folder_of(tmp_path, 1), a_capture(), None)
    assert _whole(state, heartbeat) == state and phases == ["check checkpoint"] * 2
    progress = (folder / "progress.json").read_bytes()
    (folder / "progress.json").write_bytes(progress.replace(b"TP1", b"TP2"))
    with pytest.raises(ValueError, match="SHA-256 differs"):
        _whole(state, heartbeat)
