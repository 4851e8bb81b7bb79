"""The checkpoint from which a run goes on, and when the run refuses to."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file

from rlmath.algorithms.types import Prompt
from rlmath.checkpoint.directory import Progress, finish_partial, open_partial, write_progress
from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.checkpoint.hf.metadata_files import read_metadata_files, with_stop_tokens
from rlmath.checkpoint.hf.weights import write_files
from rlmath.config.help import setting_values
from rlmath.config.length_curriculum import length_stages, planned_steps, unfinished_problem
from rlmath.config.load import config_as_yaml, load_config
from rlmath.config.schema import Config, RewardConfig
from rlmath.data.dataset import PromptFiles, SftInputs
from rlmath.data.order import PromptOrder, Rollback
from rlmath.data.sft_sequences import WrittenSequence
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.data.tokenizer import load_tokenizer
from rlmath.rollout.sampling import CPU_SAMPLER_VERSION
from rlmath.run.recovery.checkpoint_choice import choose_checkpoint
from rlmath.run.recovery.resume import (
    MAY_CHANGE,
    Origin,
    adapter_fingerprint,
    changes_since_newest,
    data_fingerprint,
    find_recovery,
    learning_hooks,
    origin_of,
    refused_changes,
    reward_fingerprint,
    sft_origin_of,
)
from rlmath.run.recovery.rollbacks_file import write_rollbacks
from rlmath.run.run_dir import check_output_folder
from rlmath.workers.hooks import code_fingerprint, hooks_fingerprint
from tests.disks import an_ordinary_user
from tests.tiny_models import make_model_folder

DECOUPLED = (
    "rollout.tail=carry",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
)
ORIGIN = Origin("model-1", "data-1")
TOTAL = 20
"""Steps of the run."""
PROGRESS = Progress(
    3,
    0,
    24,
    6,
    3,
    "TP1",
    1,
    ("exp_avg",),
    ("torch",),
    "model-1",
    "data-1",
    {"torch": "2"},
    cpu_sampler=CPU_SAMPLER_VERSION,
)


def make_config(folder: Path, *overrides: str) -> Config:
    return load_config(
        [], [f"run.output_dir={folder}", "model.path=m", "data.train_path=t.jsonl", *overrides]
    )


def checkpoint(
    folder: Path,
    step: int,
    config: Config | None = None,
    reward: str | None = None,
    changed: Mapping[str, int | str | None] = MappingProxyType({}),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Make a checkpoint of a run.

    `changed` are values of its progress (None: the value is not there); `files` are those of its
    model."""
    partial = open_partial(folder / "checkpoints", step)
    write_progress(partial, replace(PROGRESS, step=step))
    progress = (
        json.loads((partial / "progress.json").read_text())
        | changed
        | {"reward_fingerprint": reward}
    )
    progress = {name: number for name, number in progress.items() if number is not None}
    (partial / "progress.json").write_text(json.dumps(progress))
    (partial / "config.yaml").write_text(config_as_yaml(config or make_config(folder)))
    (partial / "state" / ".metadata").write_text("index")
    write_files(partial / "hf", files)
    return finish_partial(partial, step, False, {}).folder


def found_steps(config: Config, origin: Origin = ORIGIN) -> list[int]:
    recovery = find_recovery(config, origin, TOTAL)
    return [] if recovery is None else [candidate.step for candidate, _ in recovery.candidates]


def test_auto_takes_the_newest_and_disabled_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 12)
    assert found_steps(make_config(tmp_path)) == [12, 3]
    assert found_steps(make_config(tmp_path, "run.recover_mode=resume")) == [12, 3]
    assert found_steps(make_config(tmp_path, "run.recover_mode=disabled")) == []


def test_the_rollbacks_of_another_run_are_told_before_the_start(tmp_path: Path) -> None:
    checkpoint(tmp_path, 12, changed={"rollback_steps": [4], "rollback_draw_steps": [6]})
    assert found_steps(make_config(tmp_path)) == [12]
    write_rollbacks(tmp_path, [Rollback(1, 8, 9)])
    with pytest.raises(ValueError, match=r"steps \[8\], the checkpoint of step 12 those to \[4\]"):
        found_steps(make_config(tmp_path))


@pytest.mark.parametrize(
    ("made_by", "warning_count"),
    [
        ({}, 0),
        ({"cpu_sampler": 1}, 1),
        ({"cpu_sampler": 1, "syncs": 0}, 0),
        ({"cpu_sampler": None}, 1),
    ],
    ids=["this", "another", "another without engines", "one that did not write it"],
)
def test_a_checkpoint_of_another_sampler_is_told_on_cpu(
    tmp_path: Path, made_by: dict[str, int | None], warning_count: int
) -> None:
    checkpoint(tmp_path, 3, changed=made_by)
    recovery = find_recovery(make_config(tmp_path, "run.device=cpu"), ORIGIN, TOTAL)
    assert recovery is not None and len(recovery.warnings) == warning_count
    assert all("drew other tokens from the same seeds" in warning for warning in recovery.warnings)
    on_gpu = find_recovery(make_config(tmp_path, "run.device=cuda"), ORIGIN, TOTAL)
    assert on_gpu is not None and on_gpu.warnings == ()


def test_another_spelling_of_the_same_reward_function_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative or an absolute path, a module or its file, and a copy elsewhere are spellings.

    Another function or other code is a change."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def steps(*_):\n    return 1.0\n")
    (tmp_path / "copy.py").write_text("def steps(*_):\n    return 1.0\n")
    (tmp_path / "other.py").write_text("def steps(*_):\n    return 2.0\n")
    code = code_fingerprint("mine.py:steps")
    run = tmp_path / "run"

    def found(spelling: str) -> tuple[str, ...]:
        current = make_config(run, f"reward.function={spelling}")
        recovery = find_recovery(current, replace(ORIGIN, reward=code_fingerprint(spelling)), TOTAL)
        assert recovery is not None
        check_output_folder(run, current)
        return recovery.warnings

    original = make_config(run, "reward.function=mine.py:steps")
    checkpoint(run, 3, original, reward=code)
    (run / "config.yaml").write_text(config_as_yaml(original))
    for spelling in ("mine.py:steps", f"{tmp_path}/mine.py:steps", "mine:steps", "copy.py:steps"):
        assert found(spelling) == ()
    for function in ("other.py:steps", "mine.py:others", "math:steps"):
        with pytest.raises(
            ValueError, match=f"reward.function: mine.py:steps there, {function} now"
        ):
            found(function)
    (tmp_path / "mine.py").write_text("def steps(*_):\n    return 3.0\n")
    (warning,) = found(f"{tmp_path}/mine.py:steps")
    assert "the code has changed since the checkpoint of step 3" in warning


def test_selection_and_advantages_of_the_users_are_kept_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another function is refused, another spelling is no change, and other code is logged.

    So is the code of a plugin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def best(*_): ...\ndef last(*_): ...\n")
    key = "algorithm.advantage"

    def origin(config: Config) -> Origin:
        return replace(ORIGIN, hooks=hooks_fingerprint(learning_hooks(config)))

    def saved(run: Path, *settings: str) -> None:
        original = make_config(run, *settings)
        checkpoint(run, 3, original, changed={"hooks_fingerprint": origin(original).hooks})

    def warnings(run: Path, *settings: str) -> tuple[str, ...]:
        config = make_config(run, *settings)
        recovery = find_recovery(config, origin(config), TOTAL)
        assert recovery is not None
        return recovery.warnings

    direct = tmp_path / "one"
    registered = tmp_path / "registered"
    saved(direct, f"{key}=own.py:best")
    assert (
        warnings(direct, f"{key}=own.py:best")
        == warnings(direct, f"{key}={tmp_path}/own.py:best")
        == ()
    )
    for function in ("own.py:last", "grpo"):
        with pytest.raises(ValueError, match=f"{key}: own.py:best there, {function} now"):
            warnings(direct, f"{key}={function}")
    saved(registered, f"{key}=best", "run.plugins=[own.py]")
    for plugin in ("own.py", f"{tmp_path}/own.py"):
        assert warnings(registered, f"{key}=best", f"run.plugins=[{plugin}]") == ()
    (tmp_path / "own.py").write_text("def best(*_):\n    return 1\n")
    (warning,) = warnings(direct, f"{key}=own.py:best")
    assert warning.startswith(
        f"{key}=own.py:best: the code has changed since the checkpoint of step 3"
    )
    assert len(warnings(registered, f"{key}=best", "run.plugins=[own.py]")) == 1


def test_without_a_checkpoint_auto_starts_and_resume_refuses(tmp_path: Path) -> None:
    assert find_recovery(make_config(tmp_path), ORIGIN, TOTAL) is None
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
        find_recovery(make_config(tmp_path, "run.recover_mode=resume"), ORIGIN, TOTAL)


@pytest.mark.parametrize("name", ["manifest.json", "progress.json", "config.yaml"])
def test_a_damaged_newest_is_passed_over_and_told(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, 3)
    newest = checkpoint(tmp_path, 5)
    (newest / name).write_text("{")
    recovery = find_recovery(make_config(tmp_path), ORIGIN, TOTAL)
    assert recovery is not None and [candidate.step for candidate, _ in recovery.candidates] == [3]
    assert "step-000005 is damaged and is skipped" in recovery.notes[0]


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_where_all_are_damaged_nothing_starts_anew_unasked(tmp_path: Path, mode: str) -> None:
    (checkpoint(tmp_path, 5) / "progress.json").unlink()
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* is whole: the checkpoint .*step-000005 is damaged"
    ):
        find_recovery(make_config(tmp_path, f"run.recover_mode={mode}"), ORIGIN, TOTAL)


@pytest.mark.usefixtures("process_group")
def test_every_block_of_a_checkpoint_that_is_read_is_progress(tmp_path: Path) -> None:
    """A rank that reads for minutes is not taken for one that hangs."""
    checkpoint(tmp_path, 3, files={"model.safetensors": b"x" * (2**22 + 1)})
    recovery = find_recovery(make_config(tmp_path), ORIGIN, TOTAL)
    assert recovery is not None
    calls: list[int] = []
    chosen = choose_checkpoint(recovery, on_progress=lambda: calls.append(1))
    ((whole, _),) = recovery.candidates
    assert chosen is not None and chosen[0] == whole
    assert len(calls) == len(whole.files) + 1, "one file has two blocks, the others one"


@pytest.mark.parametrize("has_weights", [True, False])
def test_the_adapters_that_a_run_starts_from_are_part_of_its_origin(
    tmp_path: Path, has_weights: bool
) -> None:
    """So are the model's own weights; a dry run may have neither."""
    model = tmp_path / "model"
    adapters = tmp_path / "adapters"
    for folder, name in ((model, "config.json"), (adapters, "adapter_config.json")):
        folder.mkdir()
        (folder / name).write_text("{}")
        save_file({"w": torch.zeros(2)}, folder / "weights.safetensors")
    order = PromptOrder(2, 1, seed=1, shuffle=False)
    sequences = [WrittenSequence((1,), (token,)) for token in (5, 6)]
    supervised = SftInputs(
        sequences,
        held_out=[],
        order=order,
        total_steps=2,
        lines=(),
        reports=(),
        stop_token_ids=(1,),
    )
    prompts = [Prompt(f"q{n}", "?", (1,), solutions=("2",), task="math") for n in range(2)]
    reinforced = PromptFiles(prompts, order, 2, (), history={}, history_line="")

    def origins(*overrides: str) -> list[Origin]:
        config = make_config(tmp_path / "run", f"model.path={model}", *overrides)
        return [
            origin_of(config, reinforced, has_weights),
            sft_origin_of(config, supervised, has_weights),
        ]

    with_adapters = f"model.adapter_path={adapters}"
    plain = origins()
    first = origins(with_adapters)
    save_file({"w": torch.ones(2)}, adapters / "weights.safetensors")
    trained = origins(with_adapters)
    for without_adapters, before, after in zip(plain, first, trained, strict=True):
        assert bool(before.adapter) == bool(before.model) == has_weights
        assert without_adapters.adapter == ""
        assert (before.adapter != after.adapter) == has_weights
        assert replace(before, adapter="") == replace(after, adapter="") == without_adapters
        assert before.data == without_adapters.data != ""
    other = replace(supervised, sequences=[WrittenSequence((1,), (7,)), *sequences[1:]])
    assert sft_origin_of(make_config(tmp_path / "run"), other, False).data != plain[1].data


def unmounted(path: Path) -> None:
    path.symlink_to("/mnt/not-mounted/checkpoints")


def plain_file(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize("mode", ["auto", "resume"])
@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-000007"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            unmounted,
            'a link to "/mnt/not-mounted/checkpoints", where nothing is (a disk that is not '
            "mounted?)",
        ),
        (plain_file, "is not a folder"),
    ],
)
def test_what_cannot_be_looked_at_is_not_absent(
    tmp_path: Path, mode: str, name: str, make: Callable[[Path], None], message: str
) -> None:
    output = tmp_path / "run"
    place = output / name
    if name.endswith("7"):
        checkpoint(output, 3)
    place.parent.mkdir(parents=True, exist_ok=True)
    make(place)
    with pytest.raises(ValueError, match="what the run can resume from cannot be known") as error:
        find_recovery(make_config(output, f"run.recover_mode={mode}"), ORIGIN, TOTAL)
    assert f'"{place}" is' in str(error.value) and message in str(error.value)
    assert "Mount the disk, correct the link" in str(error.value) and place.lstat()
    assert find_recovery(make_config(output, "run.recover_mode=disabled"), ORIGIN, TOTAL) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/step-000005",
        *(f"/step-000005/{file}" for file in ("manifest.json", "progress.json", "config.yaml")),
    ],
)
def test_without_permission_nothing_older_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for step in (3, 5):
        checkpoint(tmp_path, step)
    path = Path(f"checkpoints{name}")
    (tmp_path / path).chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the folders above are this user's alone
    with an_ordinary_user(), pytest.raises(ValueError, match=rf'"{path}.*\(Permission denied\)'):
        find_recovery(make_config(Path()), ORIGIN, TOTAL)


def test_a_digit_that_changed_in_the_settings_is_damage_and_no_other_run(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    path = checkpoint(tmp_path, 5) / "config.yaml"
    path.write_text(path.read_text().replace("group_size: 16", "group_size: 12"))
    assert found_steps(make_config(tmp_path)) == [3]


def test_a_run_that_became_shorter_than_what_is_done_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, TOTAL)
    assert found_steps(make_config(tmp_path)) == [TOTAL]
    with pytest.raises(ValueError, match="20 steps are done there, the run has 19 now") as error:
        find_recovery(make_config(tmp_path), ORIGIN, TOTAL - 1)
    first, *problems, advice = str(error.value).splitlines()
    assert (
        first == f"The run cannot resume from {tmp_path}/checkpoints/step-000020:"
        and len(problems) == 1
    )
    assert advice.startswith("To start from the beginning, give another run.output_dir")


@pytest.mark.usefixtures("process_group")
def test_on_one_rank_the_newest_whole_one_is_chosen_and_without_any_it_ends(tmp_path: Path) -> None:
    for step in (3, 5):
        checkpoint(tmp_path, step)
    config = make_config(tmp_path)
    chosen = choose_checkpoint(find_recovery(config, ORIGIN, TOTAL))
    assert chosen is not None and chosen[0].step == 5
    recovery = find_recovery(config, ORIGIN, TOTAL)
    flip(tmp_path / "checkpoints" / "step-000005" / "state" / ".metadata")
    chosen = choose_checkpoint(recovery)
    assert chosen is not None and chosen[0].step == 3
    (tmp_path / "checkpoints" / "step-000003" / "state" / ".metadata").unlink()
    with pytest.raises(
        ValueError, match=r"no checkpoint is whole: .*step-000005.*step-000003 is damaged"
    ):
        choose_checkpoint(recovery)


@pytest.mark.usefixtures("process_group")
def test_what_rank_0_chose_from_is_told_before_the_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_checkpoint(None) is None
    checkpoint(tmp_path, 3)
    recovery = find_recovery(make_config(tmp_path), ORIGIN, TOTAL)
    assert recovery is not None
    choose_checkpoint(replace(recovery, notes=["5 is damaged"], warnings=("other code",)))
    assert caplog.messages == ["5 is damaged", "other code"]


@pytest.mark.usefixtures("process_group")
def test_a_file_that_cannot_be_read_now_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 5):
        checkpoint(tmp_path, step)
    monkeypatch.chdir(tmp_path)
    recovery = find_recovery(make_config(Path()), ORIGIN, TOTAL)
    tmp_path.chmod(0o755)
    (tmp_path / "checkpoints" / "step-000005" / "state" / ".metadata").chmod(0)
    with an_ordinary_user(), pytest.raises(ValueError, match="cannot be known: of ") as error:
        choose_checkpoint(recovery)
    refusal = r"step-000005 rank 0 on \S+ cannot read state/.metadata \(Permission denied\)"
    assert re.search(refusal, str(error.value))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.prompts_per_step=64", "data.prompts_per_step: 128 there, 64 now"),
        ("optimizer.lr=1e-5", "optimizer.lr: 1e-06 there, 1e-05 now"),
        ("reward.rewards=[correctness,format]", "reward.rewards: "),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name(
    tmp_path: Path, override: str, message: str
) -> None:
    checkpoint(tmp_path, 3)
    with pytest.raises(ValueError, match=message):
        find_recovery(make_config(tmp_path, override), ORIGIN, TOTAL)


def test_another_model_and_other_prompts_are_refused_and_their_paths_are_not(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, 3)
    moved = make_config(
        tmp_path,
        "model.path=elsewhere",
        "data.train_path=elsewhere.jsonl",
        "data.more_train_paths=[x]",
    )
    assert found_steps(moved) == [3]
    with pytest.raises(ValueError, match=r"model.path: what the run started from has changed"):
        find_recovery(moved, replace(ORIGIN, model="model-2"), TOTAL)
    with pytest.raises(ValueError, match=r"data.train_path: what the run started from has changed"):
        find_recovery(moved, replace(ORIGIN, data="data-2"), TOTAL)


def test_other_settings_and_other_inputs_are_named_at_once(tmp_path: Path) -> None:
    """Inputs are compared by their contents, and alone they refuse nothing before a start."""
    checkpoint(tmp_path, 3)
    moved = ("model.path=elsewhere", "data.train_path=other.jsonl")
    assert changes_since_newest(make_config(tmp_path, *moved)) == []
    rate, model, prompts = (
        changes_since_newest(make_config(tmp_path, "optimizer.lr=1e-5", *moved)) or []
    )
    assert rate == "optimizer.lr: 1e-06 there, 1e-05 now"
    assert model.startswith("model.path: ") and "elsewhere now (refused, too, if" in model
    assert prompts.startswith("data.train_path: ") and "other.jsonl now (refused" in prompts
    assert changes_since_newest(make_config(tmp_path, "optimizer.lr=1e-5")) == [rate]


@pytest.mark.parametrize(
    ("earlier_override", "override", "message"),
    [
        ("lora.rank=4", "lora.rank=8", "lora.rank: 4 there, 8 now"),
        ("lora.rank=4", "lora.rank=0", "lora.rank: 4 there, 0 now"),
        ("lora.rank=0", "lora.rank=4", "lora.rank: 0 there, 4 now"),
        ("lora.rank=4", "lora.alpha=8", "lora.alpha: 32.0 there, 8.0 now"),
        ("lora.rank=4", "lora.target=mlp", "lora.target: all there, mlp now"),
    ],
)
def test_other_adapters_are_refused_by_name(
    tmp_path: Path, earlier_override: str, override: str, message: str
) -> None:
    checkpoint(tmp_path, 3, make_config(tmp_path, earlier_override))
    assert found_steps(make_config(tmp_path, earlier_override)) == [3]
    with pytest.raises(ValueError, match=message):
        found_steps(make_config(tmp_path, earlier_override, override))


def test_the_adapters_that_a_run_began_with_are_compared_by_content(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3, changed={"adapter_fingerprint": "a"})
    origin = replace(ORIGIN, adapter="a")
    assert found_steps(make_config(tmp_path, "model.adapter_path=moved"), origin) == [3]
    for adapter in ("b", ""):
        with pytest.raises(ValueError, match=r"model.adapter_path: what .* has changed"):
            found_steps(make_config(tmp_path), replace(ORIGIN, adapter=adapter))


def test_layout_length_and_what_is_kept_may_change(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    overrides = (
        "parallel.tensor=2",
        "rollout.tensor_parallel=2",
        "run.total_steps=9",
        "save.ckpt_freq_steps=1",
    )
    overrides += ("policy.transformer_impl=local", "optimizer.overlap_grad_reduce=true")
    assert found_steps(make_config(tmp_path, *overrides)) == [3]


def test_every_entry_of_the_list_is_a_setting() -> None:
    keys = list(setting_values(make_config(Path("x"))))
    for pattern in MAY_CHANGE:
        assert any(
            key.startswith(pattern) if pattern.endswith(".") else key == pattern for key in keys
        ), pattern


def test_a_setting_whose_name_only_begins_like_one_that_may_change_is_refused() -> None:
    saved_config = make_config(Path("x"))
    changed = make_config(Path("x"), "reward.timeout_seconds=7", "optimizer.kind=sgd")
    assert refused_changes(saved_config, changed) == ["optimizer.kind: adam there, sgd now"]


def test_another_spelling_and_more_workers_of_an_environment_are_no_change(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def hints(texts, row, turn):\n    return None\n")
    (tmp_path / "other").symlink_to(tmp_path)
    saved_config = make_config(tmp_path, f"environment.function={tmp_path}/own.py:hints")
    other_spelling = make_config(
        tmp_path,
        f"environment.function={tmp_path}/other/own.py:hints",
        "environment.workers=9",
        "environment.timeout_seconds=7",
    )
    assert refused_changes(saved_config, other_spelling) == []
    (change,) = refused_changes(
        saved_config, make_config(tmp_path, f"environment.function={tmp_path}/own.py:more")
    )
    assert change.startswith("environment.function")


def test_a_run_whose_engines_merged_its_adapters_goes_on_with_adapters(tmp_path: Path):
    saved_config = make_config(tmp_path, "lora.rank=8", "lora.engine=merged")
    assert refused_changes(saved_config, make_config(tmp_path, "lora.rank=8")) == []


def test_fingerprints_tell_contents_and_not_places(tmp_path: Path) -> None:
    for name, weights in (("a", b"1" * 100), ("b", b"1" * 100), ("c", b"1" * 99 + b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    a, b, c = (model_fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c
    prompts = [Prompt("1", "x", (1, 2), ("3",), "math"), Prompt("2", "y", (4,), ("5",), "math")]
    assert data_fingerprint(prompts) == data_fingerprint(list(prompts))
    assert data_fingerprint(prompts) != data_fingerprint(prompts[::-1])
    assert data_fingerprint(prompts) != data_fingerprint(
        [prompts[0], replace(prompts[1], solutions=("6",))]
    )


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_fingerprint_sees_the_begin_middle_and_end_of_every_tensor(
    tmp_path: Path, place: str
) -> None:
    """The file has some 4 MiB.

    Its tensors in the middle lie in neither its first nor its last MiB."""
    tensors = {f"t{number}": torch.ones(64, 2048) for number in range(8)}
    fingerprints = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file(tensors, tmp_path / name / "model.safetensors")
        fingerprints.append(model_fingerprint(tmp_path / name))
        number = {"first": 0, "middle": 64 * 1024, "last": -1}[place]
        tensors["t4"].view(-1)[number] = 0.0
    assert fingerprints[0] != fingerprints[1]


def test_a_checkpoint_of_an_older_release_compares_by_its_own_rule(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"t": torch.ones(4)}, model / "model.safetensors")
    content = (model / "model.safetensors").read_bytes()
    older_hash = hashlib.sha256(
        b"{}" + f"model.safetensors:{len(content)}".encode() + content + content
    )
    run = tmp_path / "run"
    origin = replace(ORIGIN, model=model_fingerprint(model))
    checkpoint(run, 3, changed={"model_fingerprint": older_hash.hexdigest()[:16]})
    assert found_steps(make_config(run, f"model.path={model}"), origin) == [3]
    (model / "config.json").write_text("{ }")
    with pytest.raises(ValueError, match=r"model\.path: what the run started from has changed"):
        found_steps(
            make_config(run, f"model.path={model}"), replace(origin, model=model_fingerprint(model))
        )


def test_adapters_of_a_checkpoint_compare_by_their_files_in_both_forms(tmp_path: Path) -> None:
    """The older form, of files without samples of every tensor, is taken anew where it is there."""
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"r": 8}')
    save_file({"t": torch.ones(4)}, adapters / "adapter_model.safetensors")
    content = (adapters / "adapter_model.safetensors").read_bytes()
    older_hash = hashlib.sha256(
        b'{"r": 8}' + f"adapter_model.safetensors:{len(content)}".encode() + content + content
    )
    recorded = [
        model_fingerprint(adapters, "adapter_config.json"),
        older_hash.hexdigest()[:16],
    ]
    for number, fingerprint in enumerate(recorded):
        run = tmp_path / f"run-{number}"
        checkpoint(run, 3, changed={"adapter_fingerprint": fingerprint})
        config = make_config(run, f"model.adapter_path={adapters}")
        assert found_steps(config, replace(ORIGIN, adapter=adapter_fingerprint(config))) == [3]
    (adapters / "adapter_config.json").write_text('{"r": 16}')
    for number in range(len(recorded)):
        config = make_config(tmp_path / f"run-{number}", f"model.adapter_path={adapters}")
        with pytest.raises(ValueError, match=r"model\.adapter_path: what the run started from"):
            found_steps(config, replace(ORIGIN, adapter=adapter_fingerprint(config)))


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content, indent=3))


def swapped(content: dict) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]


def without_one(content: dict) -> None:
    del content["model"]["vocab"]["1"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer.json", swapped, "2 tokens have other ids, '1' 20 there and 21 now"),
        ("tokenizer.json", without_one, "tokens have other ids, '1' 20 there and none now"),
        (
            "tokenizer_config.json",
            lambda c: c.update(pad_token="<bos>"),
            "pad_token_id is 0 there and 2 now",
        ),
        (
            "generation_config.json",
            lambda c: c.update(eos_token_id=[1, 50]),
            "ended with the tokens 1 there, and do with 1, 50 now",
        ),
        (
            "tokenizer_config.json",
            lambda c: c.update(
                clean_up_tokenization_spaces=not c.get("clean_up_tokenization_spaces", False)
            ),
            "clean_up_tokenization_spaces differs",
        ),
        ("tokenizer.json", lambda c: c, None),
        ("tokenizer_config.json", lambda c: c.update(model_max_length=77, chat_template="x"), None),
        ("special_tokens_map.json", lambda c: c.update(eos_token="<eos>"), None),
        ("generation_config.json", lambda c: c.update(temperature=0.3), None),
    ],
    ids=[
        "ids",
        "a token less",
        "pad",
        "stops",
        "clean-up",
        "indented anew",
        "what changes no token",
        "a file more",
        "temperature",
    ],
)
def test_a_tokenizer_or_stops_that_were_edited_are_refused_with_what_to_do(
    tmp_path: Path, name: str, change: Callable[[dict], object], message: str | None
) -> None:
    model = make_model_folder(tmp_path / "model")
    run = tmp_path / "run"
    files = with_stop_tokens(read_metadata_files(model), (1,))
    checkpoint(run, 3, files=files)
    edit_json(model / name, change)
    config = make_config(run, f"model.path={model}")
    stops = stop_token_ids(str(model), load_tokenizer(str(model)), 101)
    origin = replace(ORIGIN, stop_token_ids=stops)
    if message is None:
        assert found_steps(config, origin) == [3]
        return
    with pytest.raises(ValueError, match="cannot resume from") as error:
        find_recovery(config, origin, TOTAL)
    assert message in str(error.value) and f'hf" into "{model}"' in str(error.value)


def test_a_file_that_is_no_json_keeps_no_run_from_resuming(tmp_path: Path) -> None:
    """macOS leaves such a file beside another when it copies a folder."""
    model = make_model_folder(tmp_path / "model")
    run = tmp_path / "run"
    (model / "._tokenizer.json").write_bytes(b"\x00\x05\x16\x07\xb0")
    checkpoint(run, 3, files=with_stop_tokens(read_metadata_files(model), (1,)))
    origin = replace(ORIGIN, stop_token_ids=(1,))
    assert found_steps(make_config(run, f"model.path={model}"), origin) == [3]


def test_the_models_tokenizer_is_read_once_for_all_checkpoints(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    run = tmp_path / "run"
    for step in (1, 2, 3):
        checkpoint(run, step, files=with_stop_tokens(read_metadata_files(model), (1,)))
    config = make_config(run, f"model.path={model}")
    origin = replace(ORIGIN, stop_token_ids=(1,))
    with opened_files() as opened:
        assert found_steps(config, origin) == [3, 2, 1]
    assert opened.count(str(model / "tokenizer.json")) == 1


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The files that Python opens meanwhile.

    An audit hook cannot be removed: it stops adding."""
    opened: list[str] = []
    listens = True

    def on_event(name: str, arguments: tuple[object, ...]) -> None:
        if listens and name == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(on_event)
    yield opened
    listens = False


STAGED = ("stages.steps=[2,4,6]", "stages.max_new_tokens=[8,16,24]")


@pytest.mark.parametrize(
    "overrides",
    [
        ("stages.steps=[2,4,9]", "stages.max_new_tokens=[8,16,32]"),
        ("stages.steps=[2,4]", "stages.max_new_tokens=[8,16]"),
        (*STAGED, "stages.max_tokens_per_microbatch=[100,100,100]", "rollout.max_new_tokens=5"),
    ],
)
def test_stages_that_have_not_begun_may_change(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    saved_config = make_config(tmp_path, *STAGED)
    for steps_done in (3, 6):
        assert refused_changes(saved_config, make_config(tmp_path, *overrides), steps_done) == []
    checkpoint(tmp_path, 3, saved_config)
    assert found_steps(make_config(tmp_path, *overrides)) == [3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("stages.steps=[2,9]", "stages.max_new_tokens=[8,17]"),
            "step 3, which is done, had at most 16 new",
        ),
        ((), "step 1, which is done, had at most 8 new tokens there, 16384 now"),
    ],
)
def test_lengths_of_steps_that_are_done_are_kept(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    checkpoint(tmp_path, 3, make_config(tmp_path, *STAGED))
    with pytest.raises(ValueError, match="cannot resume from") as error:
        find_recovery(make_config(tmp_path, *overrides), ORIGIN, TOTAL)
    assert message in str(error.value)


def test_a_run_may_get_stages_when_the_first_is_what_it_was(tmp_path: Path) -> None:
    plain = make_config(tmp_path, "rollout.max_new_tokens=8", "run.total_steps=3")
    staged = make_config(tmp_path, "stages.steps=[3,4]", "stages.max_new_tokens=[8,16]")
    assert refused_changes(plain, staged, 3) == []
    assert refused_changes(staged, plain, 3) == []
    (problem,) = refused_changes(plain, staged, 4)
    assert "step 4, which is done, had at most 8 new tokens there, 16 now" in problem
    (problem,) = refused_changes(staged, plain, 4)
    assert "step 4, which is done, had at most 16 new tokens there, 8 now" in problem
    longer = make_config(tmp_path, "stages.steps=[3,4]", "stages.max_new_tokens=[9,16]")
    assert len(refused_changes(plain, longer, 3)) == 1
    assert refused_changes(plain, make_config(tmp_path, "rollout.max_new_tokens=9")) == [
        "rollout.max_new_tokens: 8 there, 9 now"
    ]


@pytest.mark.parametrize(
    ("earlier_overrides", "overrides", "advised_overrides"),
    [
        (
            ("rollout.max_new_tokens=8",),
            ("rollout.max_new_tokens=9", "run.total_steps=20"),
            "run.total_steps=null stages.steps=[3,17] stages.max_new_tokens=[8,9]",
        ),
        (
            ("rollout.max_new_tokens=8",),
            ("rollout.max_new_tokens=9",),
            "stages.steps=[3,997] stages.max_new_tokens=[8,9]",
        ),
        (
            STAGED,
            ("stages.steps=[2,9]", "stages.max_new_tokens=[8,17]"),
            "stages.steps=[2,1,8] stages.max_new_tokens=[8,16,17]",
        ),
        (
            STAGED,
            ("rollout.max_new_tokens=32", "run.total_steps=5"),
            "run.total_steps=null stages.steps=[2,1,2] stages.max_new_tokens=[8,16,32]",
        ),
        (
            (*STAGED, "stages.max_tokens_per_microbatch=[100,200,300]"),
            (
                "stages.steps=[2,9]",
                "stages.max_new_tokens=[8,17]",
                "stages.max_tokens_per_microbatch=[100,400]",
            ),
            "stages.steps=[2,1,8] stages.max_new_tokens=[8,16,17] "
            "stages.max_tokens_per_microbatch=[100,400,400]",
        ),
    ],
)
def test_another_length_is_refused_with_the_stages_that_resume(
    tmp_path: Path,
    earlier_overrides: tuple[str, ...],
    overrides: tuple[str, ...],
    advised_overrides: str,
) -> None:
    checkpoint(tmp_path, 3, make_config(tmp_path, *earlier_overrides))
    longer = make_config(tmp_path, *overrides)
    with pytest.raises(ValueError, match="cannot resume from") as error:
        find_recovery(longer, ORIGIN, planned_steps(longer, 1000))
    assert f"For other lengths from step 4 on, resume with {advised_overrides}" in str(error.value)
    resumed = make_config(tmp_path, *overrides, *advised_overrides.split())
    assert found_steps(resumed) == [3]


def test_without_a_known_end_the_stages_that_resume_leave_the_last_number_open(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, 3, make_config(tmp_path, "rollout.max_new_tokens=8"))
    (change,) = changes_since_newest(make_config(tmp_path, "rollout.max_new_tokens=9")) or []
    assert change == (
        "rollout.max_new_tokens: 8 there, 9 now. For other lengths from step 4 on, resume with "
        "stages.steps=[3,N] stages.max_new_tokens=[8,9] (N: the steps that are left)"
    )


def test_the_same_lengths_in_other_stages_are_no_change(tmp_path: Path) -> None:
    split = ("stages.steps=[2,1,3,6]", "stages.max_new_tokens=[8,16,16,24]")
    assert refused_changes(make_config(tmp_path, *STAGED), make_config(tmp_path, *split), 3) == []


def test_a_stage_that_is_too_short_for_the_groups_in_flight_is_a_problem(tmp_path: Path) -> None:
    """Steps learn from two; three are done.

    The last stage may leave some."""

    def problem(steps: str, groups_in_flight: int) -> str | None:
        lengths = "[8,16]" if "," in steps else "[8]"
        stages = f"stages.steps=[{steps}]", f"stages.max_new_tokens={lengths}"
        config = make_config(tmp_path, *DECOUPLED, *stages)
        return unfinished_problem(
            length_stages(config, 8),
            prompts_per_step=2,
            steps_done=3,
            usable_groups=groups_in_flight,
        )

    assert problem("5,4", 4) is None and problem("4", 5) is None
    assert (
        "has 4 groups in flight, which need 2 steps of data.prompts_per_step=2 groups; "
        in problem("4,4", 4)
    )
    message = problem("5,4", 5)
    assert "stage 1 ends after step 5" in message and "after step 6 or later" in message


def test_without_a_checkpoint_all_stages_are_compared(tmp_path: Path) -> None:
    saved_config = make_config(tmp_path, *STAGED)
    changed = make_config(tmp_path, "stages.steps=[2,4,7]", "stages.max_new_tokens=[8,16,24]")
    (problem,) = refused_changes(saved_config, changed)
    assert problem.startswith("stages.steps: [2, 4, 6] there, [2, 4, 7] now")


def test_the_split_of_ranks_may_change_but_not_whether_engines_have_their_own(
    tmp_path: Path,
) -> None:
    colocated = make_config(tmp_path)
    separate = make_config(tmp_path, "rollout.ranks=2")
    four_ranks = make_config(
        tmp_path,
        "rollout.ranks=4",
        "rollout.max_concurrent_sequences=8",
        "rollout.tensor_parallel=2",
    )
    assert refused_changes(separate, four_ranks) == []
    assert refused_changes(colocated, separate) == ["rollout.ranks: 0 there, 2 now"]
    assert refused_changes(separate, colocated) == ["rollout.ranks: 2 there, 0 now"]
    older = make_config(
        tmp_path, "rollout.ranks=2", "rollout.max_staleness=3", "rollout.on_new_weights=keep"
    )
    assert refused_changes(separate, older) == [
        "rollout.max_staleness: 1 there, 3 now",
        "rollout.on_new_weights: recompute there, keep now",
    ]
    assert len(refused_changes(colocated, older)) == len(refused_changes(older, colocated)) == 3
    unused = make_config(tmp_path, "rollout.max_staleness=3", "rollout.on_new_weights=keep")
    assert refused_changes(colocated, unused) == []


def test_the_files_of_all_listed_functions_are_what_a_run_is_made_of(tmp_path: Path) -> None:
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("def f(completion, solutions, row):\n    return 1.0\n")
    first, second = (f"{name}={tmp_path}/{name}.py:f" for name in ("one", "two"))
    reward = RewardConfig(rewards=["correctness", first, second])
    fingerprint = reward_fingerprint(reward)
    assert fingerprint
    assert reward_fingerprint(replace(reward, rewards=["correctness", first])) != fingerprint
    (tmp_path / "two.py").write_text("def f(completion, solutions, row):\n    return 2.0\n")
    assert reward_fingerprint(reward) != fingerprint
    assert reward_fingerprint(RewardConfig(rewards=["correctness"])) == ""
    function = f"{tmp_path}/one.py:f"
    assert reward_fingerprint(RewardConfig(function=function)) == code_fingerprint(function) != ""


def test_data_that_a_release_before_named_without_the_ends_of_files_is_the_same(
    tmp_path: Path,
) -> None:
    """They are the same where there are as many files.

    The order of the sequences of two files is another than that of one."""
    checkpoint(tmp_path, 3)
    origin = Origin("model-1", "data-2", older_data="data-1")
    assert found_steps(make_config(tmp_path), origin) == [3]
    changed = (
        r"data.train_path: what .* has changed \(fingerprint data-1 of t.jsonl there, data-2 of "
    )
    with pytest.raises(ValueError, match=f"{changed}v.jsonl now"):
        found_steps(
            make_config(tmp_path, "data.train_path=v.jsonl", "data.more_train_paths=[u.jsonl]"),
            origin,
        )
