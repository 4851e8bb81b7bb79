"""Captures of steps: what is written is read again, and what is damaged is refused."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.algorithms.dynamic_sampling import Chosen, Selection
from rlmath.algorithms.types import (
    Completion,
    Prompt,
    RoutesAt,
    Score,
    ScoredGroup,
    Segment,
    ToolCall,
)
from rlmath.checkpoint.capture import (
    CAPTURE_FILE,
    GROUPS_FILE,
    TOKENS_FILE,
    Capture,
    CapturedMinibatch,
    CapturedUpdate,
    check_route_files,
    folder_of,
    read_capture,
    route_folder,
    write_capture,
)
from rlmath.checkpoint.directory import MANIFEST, file_entry
from rlmath.checkpoint.route_files import write_routes
from rlmath.checkpoint.unfinished_groups import route_file
from rlmath.cli.train import replay as replay_command
from rlmath.config.length_curriculum import length_stages
from rlmath.config.load import config_as_yaml
from rlmath.config.schema import Config, RunConfig, StagesConfig
from rlmath.data.order import PromptOrder, Rollback, seed_after
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    MISTAKE,
    NOTHING_COMPARED,
)
from rlmath.distributed.mesh import Mesh
from rlmath.replay import replay_step
from rlmath.replay.replay import find_capture, find_state
from rlmath.replay.replay_step import compare, compare_groups, comparison_lines, rollout_line
from rlmath.rollout.collector import Rollout
from rlmath.rollout.sampling import RolloutSeed
from rlmath.trainer.recorder import StepRecorder


def group(name: str, *completions: tuple[int, ...]) -> ScoredGroup:
    prompt = Prompt(
        name,
        f"{name}=\x1b[2J\ud800",
        (5, 6, 7),
        ("\\\\boxed{1}",),
        "math",
        '{"n": 1}',
        question="How many?",
    )
    sampled_completions = [
        Completion(
            g,
            array("i", tokens),
            array("f", [-0.1 * (t + 1) for t in range(len(tokens))]),
            "so \\\\boxed{1}",
            "stop",
            4,
            (Segment(len(tokens), 4, 1),),
        )
        for g, tokens in enumerate(completions)
    ]
    return ScoredGroup(
        prompt,
        tuple(sampled_completions),
        tuple(Score(5.0, True, "1", "number") for _ in sampled_completions),
    )


def a_capture() -> Capture:
    minibatch = CapturedMinibatch(
        {"loss": -1.5, "tokens": 4.0, "grad_norm": math.inf, "mismatch_max": 0.5}, None
    )
    update = CapturedUpdate([minibatch], [], [[0.5, -0.5], [1.0]], "ab")
    return Capture(
        step=1,
        reason="a test",
        settings_yaml="run:\n  seed: 1\n",
        total_steps=3,
        length_stage=0,
        sampling_seed=7,
        rollbacks=0,
        layout="TP1 x PP1 x DP1",
        world_size=1,
        groups=[group("a", (1, 2), (3,)), group("b", (4,), (8, 9, 9))],
        chosen=[(0, 1), (1,)],
        update=update,
        weights_before="ab",
        versions={"torch": "2"},
    )


def written(place: Path) -> Path:
    folder = write_capture(place, a_capture())
    assert folder is not None
    return folder


def test_a_capture_is_read_as_it_was_written(tmp_path: Path) -> None:
    capture = a_capture()
    folder = written(tmp_path)
    assert folder == tmp_path / "captures" / "step-000002"
    assert read_capture(folder) == capture
    # As earlier versions wrote it.
    edit_header(folder, weights_before={"digest": "ab", "projections": {"w": [1.0]}})
    assert read_capture(folder) == capture
    assert [len(group.completions) for group in capture.learned] == [2, 1]
    assert [group.prompt.question for group in read_capture(folder).groups] == ["How many?"] * 2
    text = (folder / GROUPS_FILE).read_text(encoding="ascii")
    assert (
        "\x1b" not in text
        and json.loads(text.splitlines()[0])["completions"][0]["score"]["reward"] == 5.0
    )


def test_a_capture_knows_which_tokens_others_wrote(tmp_path: Path) -> None:
    (written_group, other) = a_capture().groups
    first = written_group.completions[0]
    spans = (Segment(1, 4, 1), Segment(1, 4, 1, sampled=False))
    completions = (replace(first, segments=spans), *written_group.completions[1:])
    capture = replace(a_capture(), groups=[replace(written_group, completions=completions), other])
    folder = write_capture(tmp_path, capture)
    assert folder is not None and read_capture(folder) == capture
    assert capture.groups[0].completions[0].sampled == [True, False]
    rows = (folder / GROUPS_FILE).read_text(encoding="ascii").splitlines()
    segments = [
        [completion["segments"] for completion in json.loads(row)["completions"]] for row in rows
    ]
    assert segments == [[[[1, 4, 1], [1, 4, 1, 0]], [[1, 4, 1]]], [[[1, 4, 1]], [[3, 4, 1]]]]


def routed(output_dir: Path, capture: Capture, tokens: int) -> Capture:
    """The capture with routes of so many tokens of each completion on ranks 1 and 0."""
    numbers = itertools.count()
    groups = []
    files: dict[str, dict[int, torch.Tensor]] = {}
    for whole_group in capture.groups:
        completions = []
        for completion in whole_group.completions:
            place = RoutesAt(1 - completion.sample_index, next(numbers), tokens=tokens)
            routes_NLK = torch.full((tokens, 3, 2), place.number, dtype=torch.uint8)
            files.setdefault(route_file(place.rank), {})[place.number] = routes_NLK
            completions.append(replace(completion, routes_at=(place,)))
        groups.append(replace(whole_group, completions=tuple(completions)))
    folder = route_folder(output_dir, capture.step)
    folder.mkdir(parents=True)
    digests = {}
    for name, routes in files.items():
        (folder / name).write_bytes(write_routes(routes))
        digests[name] = file_entry(folder / name).sha256
    return replace(capture, groups=groups, route_files=digests)


def test_a_capture_has_the_routes_of_what_is_learned_from(tmp_path: Path) -> None:
    """It can be read without their files, and a completion with too few is noticed.

    Only such a capture has a version that programs without routes refuse."""
    capture = replace(a_capture(), groups=[group("a", (1, 2), (3, 4))], chosen=[(1,)])
    routed_capture = routed(tmp_path, capture, tokens=4)
    folder = write_capture(tmp_path, routed_capture)
    assert folder is not None
    read = read_capture(folder)
    assert [completion.routes_at for completion in read.groups[0].completions] == [
        (),
        (RoutesAt(0, 1, tokens=4),),
    ]
    assert read.folder == folder and read.has_routes
    assert read.route_files == routed_capture.route_files
    assert read.route_files[route_file(0)] == file_entry(folder / route_file(0)).sha256
    plain = write_capture(tmp_path / "plain", capture)
    assert plain is not None and not read_capture(plain).has_routes
    versions = [
        json.loads((place / CAPTURE_FILE).read_text())["version"] for place in (plain, folder)
    ]
    assert versions == [2, 3]
    edit_header(folder, version=2)  # as earlier versions wrote it
    path = folder / route_file(0)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert read_capture(folder) == read
    check_route_files(read, rank=1, world_size=2)
    with pytest.raises(ValueError, match=f"{route_file(0)} is not as it was written"):
        check_route_files(read, rank=0, world_size=2)
    path.unlink()
    assert read_capture(folder) == read
    with pytest.raises(ValueError, match=f"No such file.*{route_file(0)}"):
        check_route_files(read, rank=0, world_size=1)
    write_capture(tmp_path / "few", routed(tmp_path / "few", capture, tokens=3))
    with pytest.raises(ValueError, match="4 tokens need routes, and 3 have some"):
        read_capture(folder_of(tmp_path / "few", capture.step))


def test_a_capture_has_the_calls_of_completions(tmp_path: Path) -> None:
    capture = a_capture()
    first, *others = capture.groups
    call = ToolCall("print(1)", "1\n", "ok", position=3, seconds=0.5, cpu_seconds=0.1, is_cut=True)
    calling = replace(first.completions[0], calls=(call, replace(call, status="error")))
    group_with_calls = replace(first, completions=(calling, *first.completions[1:]))
    write_capture(tmp_path, replace(capture, groups=[group_with_calls, *others]))
    (read, *_) = read_capture(folder_of(tmp_path, capture.step)).groups
    assert read == group_with_calls
    assert [(c.seconds, c.cpu_seconds) for c in read.completions[0].calls] == [(0.5, 0.1)] * 2
    rows = (folder_of(tmp_path, capture.step) / GROUPS_FILE).read_text().splitlines()
    assert "calls" not in rows[1]


def test_a_capture_takes_the_place_of_an_older_one_only(tmp_path: Path) -> None:
    folder = written(tmp_path)
    before = (folder / CAPTURE_FILE).stat()
    assert write_capture(tmp_path, a_capture(), since=before.st_mtime - 1) is None
    assert (folder / CAPTURE_FILE).stat().st_ino == before.st_ino
    assert write_capture(tmp_path, a_capture(), since=before.st_mtime + 1) == folder
    assert (folder / CAPTURE_FILE).stat().st_ino != before.st_ino
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_capture_has_the_place_of_its_step_in_the_run(tmp_path: Path) -> None:
    """A capture has what the recorder is given and what it asks the trainer for.

    A rollback has changed the seeds."""
    config = Config(run=RunConfig(output_dir=str(tmp_path), seed=3))
    order = PromptOrder(40, 4, seed=3, shuffle=True)
    order.roll_back([Rollback(1, 5, 6)])
    trainer: Any = SimpleNamespace(
        config=config, order=order, total_steps=11, rollbacks=(1, 2), mesh=Mesh(0, 4, 2, 1, 1)
    )
    recorder = StepRecorder(trainer, ())
    capture = a_capture()
    chosen = [Chosen(samples) for samples in capture.chosen]
    advantages = [[0.25, -0.25], [2.0]]
    recorder.before_update(6, 1, Selection(capture.groups, chosen, wanted=2), advantages)
    recorder.write("a test")
    recorded = read_capture(tmp_path / "captures" / "step-000007")
    assert (recorded.step, recorded.total_steps, recorded.length_stage, recorded.rollbacks) == (
        6,
        11,
        1,
        2,
    )
    assert (recorded.layout, recorded.world_size) == ("TP2 x PP1 x DP2", 4)
    assert (recorded.sampling_seed, recorded.own_advantages) == (seed_after(3, 1), advantages)
    assert (recorded.chosen, recorded.settings_yaml) == (capture.chosen, config_as_yaml(config))


def test_a_step_is_written_once_for_its_first_reason(tmp_path: Path) -> None:
    """Also where the disk's clock is behind, so that the file looks older than the step."""
    trainer: Any = SimpleNamespace(
        config=Config(run=RunConfig(output_dir=str(tmp_path))),
        order=PromptOrder(40, 4, seed=3, shuffle=True),
        total_steps=11,
        rollbacks=(),
        mesh=Mesh(0, 1, 1, 1, 1),
    )
    recorder = StepRecorder(trainer, ())
    capture = a_capture()
    selection = Selection(capture.groups, [Chosen(samples) for samples in capture.chosen], wanted=2)
    recorder.write("before any step")
    assert not (tmp_path / "captures").exists()
    for number in (0, 1):
        recorder.before_update(number, 0, selection, None)
        for reason in ("it diverged", "it failed"):
            recorder.write(f"{reason} in {number}")
            file = tmp_path / "captures" / f"step-{number + 1:06d}" / CAPTURE_FILE
            os.utime(file, (0, 0))
        assert read_capture(file.parent).reason == f"it diverged in {number}"


def test_a_rollout_is_made_again_with_the_seed_and_the_lengths_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    class Asked:
        def __init__(self, *engine: Any, **parts: Any) -> None:
            asked.append((engine, parts))

        def collect(self, what: Any) -> Rollout:
            asked.append(what)
            return Rollout(capture.groups, [])

    monkeypatch.setattr(replay_step, "Collector", Asked)
    capture = replace(a_capture(), step=6, length_stage=1, sampling_seed=77)
    config = Config(run=RunConfig(seed=3), stages=StagesConfig(steps=[4, 5], max_new_tokens=[8, 9]))
    prompts = [group.prompt for group in capture.groups]
    workers = object()
    inputs = SimpleNamespace(tokenizer="t", prompts=prompts)
    shapes = SimpleNamespace(length_stages=length_stages(config, capture.total_steps))
    prepared: Any = SimpleNamespace(config=config, inputs=inputs, shapes=shapes)
    parts: list[Any] = ["engine", "mesh", workers]
    assert replay_step._sample_again(capture, prepared, *parts) == capture.groups
    (positional, keywords), request = asked
    assert positional == ("engine", "mesh")
    assert keywords == {
        "tokenizer": "t",
        "rollout": config.rollout,
        "reward": config.reward,
        "pool": workers,
    }
    assert (request.prompts, request.sampling.max_new_tokens, request.seed) == (
        prompts,
        9,
        RolloutSeed(77, 6),
    )


def test_only_one_of_many_ranks_writes(tmp_path: Path) -> None:
    (tmp_path / "captures" / "step-000002.partial").mkdir(parents=True)
    assert write_capture(tmp_path, a_capture()) is None
    assert [path.name for path in (tmp_path / "captures").iterdir()] == ["step-000002.partial"]


def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "captures").write_text("a file in the place of the folder")
    with pytest.raises(OSError):
        write_capture(tmp_path, a_capture())


def edit_header(folder: Path, **values: object) -> None:
    row = json.loads((folder / CAPTURE_FILE).read_text())
    (folder / CAPTURE_FILE).write_text(json.dumps(row | values))


def flip_a_byte(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)


def edit_groups(folder: Path, text: str) -> None:
    """Whoever changes a file can change its digest, too."""
    (folder / GROUPS_FILE).write_text(text)
    edit_header(folder, digests={})


def fifo(folder: Path) -> None:
    (folder / GROUPS_FILE).unlink()
    os.mkfifo(folder / GROUPS_FILE)


DAMAGES = {
    "another version": (lambda f: edit_header(f, version=1), "form is version 1; needed: 2 or 3"),
    "negative step": (lambda f: edit_header(f, step=-1), "-2 is no count"),
    "no update": (lambda f: edit_header(f, update={"minibatches": 3}), "damaged"),
    "no JSON": (lambda f: edit_groups(f, "{"), "damaged"),
    "deep JSON": (lambda f: edit_groups(f, "[" * 100_000), "damaged"),
    "too few rows": (lambda f: edit_groups(f, ""), "there are too many tokens"),
    "a FIFO": (fifo, "FIFO"),
    "no settings": (
        lambda f: (f / "config.yaml").unlink(),
        "cannot be read: No such file.*config.yaml",
    ),
    "a byte of the tokens": (
        lambda f: flip_a_byte(f, TOKENS_FILE),
        f"{TOKENS_FILE} is not as it was written",
    ),
    "a byte of the groups": (
        lambda f: flip_a_byte(f, GROUPS_FILE),
        f"{GROUPS_FILE} is not as it was written",
    ),
    "a folder in the place": (
        lambda f: ((f / TOKENS_FILE).unlink(), (f / TOKENS_FILE).mkdir()),
        "is a folder",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_capture_is_refused(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path)
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(ValueError, match=message):
        read_capture(folder)


def test_what_may_not_be_read_is_no_damage(tmp_path: Path) -> None:
    """The reading process lacks root's rights."""
    folder = written(tmp_path)
    program = (
        "import os, sys; from rlmath.replay.replay import find_capture, read_capture; os.getuid() "
        "or os.setuid(65534)\n"
        "for read in (find_capture, lambda run, step: read_capture(run)):\n"
        "    try: read(__import__('pathlib').Path(sys.argv[1]), None)\n"
        "    except ValueError as error: print(error)"
    )
    for name in (TOKENS_FILE, "."):
        (folder / name).chmod(0)
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    refused, unread = done.stdout.splitlines()
    assert refused == f'"{folder}" cannot be read: Permission denied', done.stderr
    assert unread.startswith(f'the capture "{folder}" cannot be read: Permission denied'), (
        done.stderr
    )


def test_captures_and_states_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no capture"):
        find_capture(tmp_path, None)
    folder = written(tmp_path)
    assert (
        find_capture(tmp_path, None)
        == find_capture(tmp_path, 2)
        == find_capture(folder, None)
        == folder
    )
    with pytest.raises(ValueError, match="no capture of step 3; captures there: step-000002"):
        find_capture(tmp_path, 3)
    with pytest.raises(ValueError, match=r"checkpoints/step-000001.*--state FOLDER"):
        find_state(folder, read_capture(folder), None)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        find_state(folder, read_capture(folder), None)


def test_a_machine_that_is_too_small_for_the_runs_ranks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_capture(tmp_path, replace(a_capture(), world_size=4096))
    assert replay_command([str(tmp_path)]) == MISTAKE
    assert "the run had 4096 ranks, and this machine has" in capsys.readouterr().err


def test_a_comparison_counts_every_number() -> None:
    capture = a_capture()
    assert capture.update is not None
    unchanged = compare(capture, "ab", capture.update)
    assert (
        unchanged.start == unchanged.weights == "equal"
        and unchanged.bit_equal
        and unchanged.same(0.0)
    )

    def changed(**numbers: float) -> CapturedUpdate:
        (minibatch,) = capture.update.minibatches  # pyright: ignore[reportOptionalMemberAccess]
        altered = CapturedMinibatch(minibatch.numbers | numbers, minibatch.discarded)
        return CapturedUpdate([altered], [], capture.update.advantages)  # pyright: ignore[reportOptionalMemberAccess]

    comparison = compare(capture, "ab", changed(loss=-1.5 + 4e-4))  # of 4 tokens
    assert not comparison.bit_equal
    assert comparison.same(1.01e-4) and not comparison.same(0.99e-4)
    assert not compare(capture, "ab", changed(grad_norm=1.0)).same(1.0)
    assert compare(capture, "ab", changed(mismatch_max=0.6)).same(1e-4)
    assert not compare(capture, "ab", changed(mismatch_max=0.6)).same(0.0)
    assert not compare(capture, "ab", changed(tokens=math.nan)).same(1.0)
    others = compare(capture, "cd", capture.update)
    assert others.start == "other" and not others.same(1.0)
    after = compare(capture, "ab", replace(capture.update, weights_after="ef"))
    assert after.weights == "other" and after.same(0.0) and not after.bit_equal
    advantages = replace(capture.update, advantages=[[0.5, -0.5], [1.5]])
    assert not compare(capture, "ab", advantages).same(0.3)
    assert compare(capture, "ab", advantages).same(0.34)
    for other, sizes in (([[0.5, -0.5]], [2]), ([[0.5, -0.5], [1.0, 0.0]], [2, 2])):
        shapes = compare(capture, "ab", replace(capture.update, advantages=other))
        assert shapes.mistakes == (f"advantages: groups of [2, 1] captured, of {sizes} replayed",)
        assert not shapes.same(1.0) and shapes.status(1.0) == FAILURE
    fewer = CapturedUpdate([], [], capture.update.advantages)
    assert compare(capture, "ab", fewer).mistakes == ("minibatches: 1 captured, 0 replayed",)


def test_a_step_without_an_update_compares_nothing_and_says_so() -> None:
    no_update = CapturedUpdate([], [], [[0.0, 0.0], [0.0]], weights_after="ab")
    capture = replace(a_capture(), update=no_update)
    comparison = compare(capture, "ab", no_update)
    assert comparison.status(0.0) == NOTHING_COMPARED
    assert not comparison.same(1.0) and not comparison.bit_equal
    *_, last = comparison_lines(capture, comparison, no_update, 0.0)
    assert last == "Nothing was compared: step 2 made no update, neither in the run nor here"
    # Other weights, other advantages and an update in one of the two only are differences.
    assert compare(capture, "cd", no_update).status(1.0) == FAILURE
    assert (
        compare(capture, "ab", replace(no_update, advantages=[[0.5, 0.0], [0.0]])).status(0.1)
        == FAILURE
    )
    update = a_capture().update
    assert update is not None
    assert (
        compare(capture, "ab", replace(update, advantages=no_update.advantages)).status(1.0)
        == FAILURE
    )
    assert compare(a_capture(), "ab", update).status(0.0) == FINISHED


def test_a_step_that_ended_in_its_update_compares_nothing_and_says_so() -> None:
    capture = replace(a_capture(), update=None, reason="diverged")
    update = a_capture().update
    assert update is not None
    comparison = compare(capture, "ab", update)
    assert comparison.status(0.0) == NOTHING_COMPARED
    *_, last = comparison_lines(capture, comparison, update, 0.0)
    assert last.startswith(
        "Nothing was compared: the run ended in the update (diverged); the replay gave ["
    )
    other_start = compare(capture, "cd", update)
    assert other_start.status(1.0) == FAILURE
    *_, last = comparison_lines(capture, other_start, update, 1.0)
    assert last.startswith("NOT the same: the run ended in the update (diverged)")


def test_a_rollout_without_completions_compares_nothing_and_says_so() -> None:
    groups = a_capture().groups
    nothing = compare_groups([], [])
    identical = compare_groups(groups, groups)
    assert (nothing.status, identical.status) == (NOTHING_COMPARED, FINISHED)
    assert rollout_line(nothing) == "Nothing was compared: the step has no completion"
    assert rollout_line(identical).startswith(
        "4 of 4 completions have the same tokens, 4 the same reward"
    )
