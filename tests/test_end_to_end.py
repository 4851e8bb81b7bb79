"""The program as a user runs it.

Data and model come from the tools; a run on one rank, or on two under torchrun, leaves a model."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from safetensors.torch import load_file

from rlmath.answers.verifier import verify
from rlmath.checkpoint.capture import read_capture
from rlmath.config.load import load_config
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    MISTAKE,
    SAVED_AND_STOPPED,
    read_exit_status,
)
from rlmath.run.startup import prepare_grpo
from tests.disks import small_disk
from tests.forked_ranks import replay, run_ranks
from tests.programs import REPOSITORY, TRAIN, metric_rows, run, small_run, torchrun_command
from tests.reward_by_hash import hash_of
from tests.selection import matrix, two_ranks
from tests.test_resume import assert_goes_on_with_other_ranks, interrupted_after

with_two_ranks = pytest.mark.parametrize("workplace", [two_ranks(matrix)], indirect=True)

STEPS = 3
PROMPTS = 12
PER_STEP = 8
GROUP = 4
MINIBATCHES = 2
EPOCHS = 2
UPDATES = MINIBATCHES * EPOCHS
"""Optimizer steps of one step."""
KL_COEF = 0.01
RUN = f"""
run.total_steps={STEPS} run.seed=3 optimizer.warmup_steps=3 algorithm.kl_coef={KL_COEF}
algorithm.reference_every_steps={STEPS - 1} algorithm.recompute_logprobs=true algorithm.epochs={EPOCHS}
algorithm.clip_ratio=1e-4 reward.function=tests.reward_by_hash:reward telemetry.sample_groups_per_step={PER_STEP}
telemetry.capture_steps=[2]
""".split()
METRICS = set(
    """
    task_reward final_reward kl_reward importance_weight actor_clip_ratio actor_loss ppo_approx_kl advantage avg_seq_len
    avg_prompt_len n_tokens n_valid_tokens n_seqs no_eos_ratio rollout/rewards rollout/response_length
    rollout/policy_version rollout/idle_share rollout/idle_share_max rollout/tail_share
    rollout/batch_fill train/entropy_loss train/grad_norm train/learning_rate train/early_stopped_minibatches
    train/behaviour_logprob_diff seconds/rollout seconds/update seconds/sync seconds/step seconds/save
    tokens_per_second/rollout rollout/mfu train/mfu memory_gib
    """.split()
)


def program(place: Path, output: Path, *more: str) -> list[str]:
    saved = (
        "save.ckpt_freq_steps=1",
        f"save.keep_last={STEPS}",
        "save.save_freq_steps=2",
        "save.export_hf=true",
    )
    overrides = (
        *small_run(place, output),
        *RUN,
        f"data.train_path={place}/few.jsonl",
        *saved,
        *more,
    )
    return [*TRAIN, *overrides]


def command(place: Path, output: Path, *more: str, ranks: int = 2) -> list[str]:
    return torchrun_command(ranks, *program(place, output, *more))


@pytest.fixture(scope="module", params=[1, two_ranks(matrix)])
def workplace(
    made_arithmetic: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """Data, a random model, and a finished run of three steps with a reference.

    The run has 12 prompts and uses 8 of them a step, so that its steps are epochs and share
    prompts; a hash of text and solutions rewards."""
    ranks = request.param
    place = tmp_path_factory.mktemp("workplace") / f"TP{ranks}"
    shutil.copytree(made_arithmetic, place)
    lines = (place / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:PROMPTS]
    (place / "few.jsonl").write_text("".join(lines))
    if ranks == 1:
        process = run_ranks(1, program(place, place / "run", "parallel.tensor=1"))
    else:
        process = run(*command(place, place / "run"))
    (place / "console.txt").write_text(process.stdout + process.stderr)
    return place


def test_every_step_tells_its_metrics(workplace: Path) -> None:
    metrics = metric_rows(workplace / "run")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert row.keys() >= METRICS
        has_second_engine = "rollout/idle_share/engine_1" in row
        assert has_second_engine == (workplace.name == "TP2")
        assert row["n_seqs"] == PER_STEP * GROUP and row["train/minibatches"] == UPDATES
        assert row["n_tokens"] == pytest.approx(row["avg_seq_len"] * row["n_seqs"])
        assert row["train/behaviour_logprob_diff_max"] < 1e-5
        assert 0 < row["train/mfu"] < 1 and 0 < row["rollout/mfu"] < 1
    assert metrics[0]["train/reference_kl"] == pytest.approx(0, abs=1e-2)
    assert metrics[1]["train/reference_kl"] > metrics[0]["train/reference_kl"]
    # After the second step the policy becomes the reference.
    assert metrics[2]["train/reference_kl"] < metrics[1]["train/reference_kl"] / 2


def samples(folder: Path) -> list[list[dict]]:
    """The groups of every step as they are kept."""
    files = [folder / "samples" / f"step-{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_every_step_samples_anew(workplace: Path) -> None:
    """Texts of two steps would begin alike if they had the same seeds.

    The weights have hardly moved."""
    texts = [
        {
            group["prompt_id"]: [completion["text"][:6] for completion in group["completions"]]
            for group in groups
        }
        for groups in samples(workplace / "run")
    ]
    for before, after in ((0, 1), (1, 2), (0, 2)):
        common_prompts = texts[before].keys() & texts[after].keys()
        assert len(common_prompts) >= 2 * PER_STEP - PROMPTS
        matches = [
            a == b
            for name in common_prompts
            for a, b in zip(texts[before][name], texts[after][name], strict=True)
        ]
        assert sum(matches) <= len(matches) / 4
    for step in texts:
        assert all(len(set(beginnings)) > 1 for beginnings in step.values())


def test_rewards_and_advantages_belong_to_their_texts(workplace: Path) -> None:
    for row, groups in zip(metric_rows(workplace / "run"), samples(workplace / "run"), strict=True):
        assert len(groups) == PER_STEP and all(
            len(group["completions"]) == GROUP for group in groups
        )
        rewards = []
        by_token = 0.0
        tokens = 0
        for group in groups:
            hashes = [
                hash_of(completion["text"], group["solutions"])
                for completion in group["completions"]
            ]
            assert [completion["reward"] for completion in group["completions"]] == pytest.approx(
                hashes, abs=1e-6
            )
            mean, deviation = fmean(hashes), stdev(hashes)
            expected = [(reward - mean) / (deviation + 1e-6) for reward in hashes]
            assert [
                completion["advantage"] for completion in group["completions"]
            ] == pytest.approx(expected, abs=1e-4)
            rewards += hashes
            lengths = [completion["length"] for completion in group["completions"]]
            by_token += sum(a * n for a, n in zip(expected, lengths, strict=True))
            tokens += sum(lengths)
        assert (
            row["task_reward"] == row["rollout/rewards"] == pytest.approx(fmean(rewards), abs=1e-6)
        )
        assert row["advantage"] == pytest.approx(by_token / tokens, abs=1e-4)
        assert row["reward/correct"] == pytest.approx(fmean(reward > 0 for reward in rewards))
        verified = [
            verify(completion["text"], group["solutions"]).correct
            for group in groups
            for completion in group["completions"]
        ]
        assert row["rollout/accuracy"] == fmean(verified), (
            "the reward is a hash, the accuracy the verifier's"
        )
        assert row["n_valid_tokens"] == tokens


def test_kl_and_clipping_are_at_work(workplace: Path) -> None:
    """The ratio is no longer 1 after the first minibatch, and the narrow bounds cut."""
    for row in metric_rows(workplace / "run"):
        assert row["kl_reward"] == pytest.approx(-KL_COEF * row["train/reference_kl"])
        assert row["final_reward"] == pytest.approx(row["task_reward"] + row["kl_reward"])
        assert (
            row["importance_weight"] == pytest.approx(1.0, abs=0.1)
            and row["importance_weight"] != 1.0
        )
        assert 0 < row["actor_clip_ratio"] < 1 - 1 / UPDATES
        assert row["train/grad_norm"] > 0


def test_the_console_tells_the_steps_and_what_is_not_at_its_default(workplace: Path) -> None:
    console = (workplace / "console.txt").read_text()
    engines = {"TP1": "1 engine", "TP2": "2 engines"}[workplace.name]
    assert f"Layout: {workplace.name} x PP1 x DP1, {engines} of TP1" in console
    (data,) = re.findall(r"^  data: .*$", console, re.MULTILINE)
    assert "prompts_per_step=8" in data and "shuffle" not in data
    assert "  sft: " not in console and "weight_decay" not in console
    step_lines = [line for line in console.splitlines() if re.match(r"\d\d:\d\d:\d\d step ", line)]
    for step, line, row in zip((1, 2, 3), step_lines, metric_rows(workplace / "run"), strict=True):
        assert len(line) <= 80
        numbers = f"reward {row['task_reward']:.3f} acc {row['rollout/accuracy']:.3f}"
        assert re.fullmatch(
            rf"{line[:9]}step {step}/{STEPS} {re.escape(numbers)} len \S+ .*s{' left [0-9:]+' * (step > 1)}",
            line,
        )
    assert step_lines[-1].endswith(" left 0:00")
    assert not re.search(r"[\r\x1b]", console)


@with_two_ranks
def test_the_console_has_only_lines_of_the_program_and_those_of_libraries_are_in_the_log(
    workplace: Path,
) -> None:
    console = (workplace / "console.txt").read_text()
    assert [
        line for line in console.splitlines() if not re.match(r"\d\d:\d\d:\d\d |  ", line)
    ] == []
    log = (workplace / "run" / "run.log").read_text()
    libraries = re.findall(r" [A-Z]+: ((?:vllm|torch|py|megatron)\.[\w.]+): (.+)", log)
    assert {"vllm", "py"} <= {name.partition(".")[0] for name, _ in libraries}
    assert [text for _, text in libraries if text in console] == []
    assert "deprecated" not in "".join(text for name, text in libraries if name.startswith("vllm."))
    warnings = [
        line.partition("WARNING: ")[2] for line in console.splitlines() if "WARNING: " in line
    ]
    assert len(warnings) == 2 and all(text.startswith("step 1: ") for text in warnings)


def test_the_log_file_has_every_setting_and_the_lines_of_the_steps(workplace: Path) -> None:
    log = (workplace / "run" / "run.log").read_text()
    assert "  prompts_per_step: 8\n" in log and "weight_decay: " in log and "INFO: Starting" in log
    assert all(f"INFO: step {step}/{STEPS} reward " in log for step in (1, 2, 3))


def test_the_run_leaves_summary_samples_and_events(workplace: Path) -> None:
    folder = workplace / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["tokens_per_second"] > 0
    assert summary["median_seconds"].keys() >= {"sync", "switch", "rollout", "update", "step"}
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        f"step-{step:06d}.jsonl" for step in (1, 2, 3)
    ]
    assert any((folder / "tensorboard").iterdir())
    report = (folder / "report.html").read_text()
    assert f"{workplace.name} x PP1 x DP1" in report and '"title":"Seconds by phase"' in report
    console = run("-m", "rlmath.cli.samples", str(folder)).stdout
    assert "reward" in console


@pytest.mark.full
def test_the_exported_model_answers_alike_in_transformers_and_vllm(workplace: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = workplace / "run" / "hf_model"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(workplace / "base", dtype=torch.float32)
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True)
    )
    lines = (workplace / "data" / "heldout.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines[:8]]
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    console = run("-m", "tests.greedy_answers", str(exported), "16", json.dumps(prompts)).stdout
    assert json.loads(console.strip().splitlines()[-1]) == answers


@with_two_ranks
def test_a_run_goes_on_with_another_number_of_ranks(workplace: Path, tmp_path: Path) -> None:
    """Killed after its second step, with two ranks; one rank makes the third."""
    whole = workplace / "run"
    folder = tmp_path / "run"
    interrupted_after(2, whole, folder)
    run(*command(workplace, folder, "parallel.tensor=1", ranks=1))
    assert_goes_on_with_other_ranks(folder, whole)


def test_a_kept_checkpoint_is_exported_and_converts_to_the_very_same_model(
    workplace: Path, tmp_path: Path
) -> None:
    whole = workplace / "run"
    assert [path.name for path in (whole / "models").iterdir()] == ["step-000002"]
    manifests = [json.loads(path.read_text()) for path in whole.glob("checkpoints/*/manifest.json")]
    assert [manifest["step"] for manifest in manifests if manifest["kept"]] == [2]
    checkpoint = str(whole / "checkpoints" / "step-000002")
    run(
        "-m",
        "rlmath.cli.convert",
        "to-hf",
        "--checkpoint",
        checkpoint,
        "--output",
        str(tmp_path / "hf"),
    )
    converted, exported = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "hf", whole / "models" / "step-000002")
    )
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[name], exported[name]) for name in converted)


@with_two_ranks
def test_a_mistake_is_told_before_anything_starts(workplace: Path) -> None:
    overrides = small_run(workplace, workplace / "other")
    process = run(*torchrun_command(2, *TRAIN, *overrides, "rollout.grop_size=4"), expect=1)
    assert "did you mean" in process.stderr and "rollout.group_size" in process.stderr
    report = process.stderr[process.stderr.index("train_grpo.py FAILED") :]
    assert "<NO_OTHER_FAILURES>" in report, "the other rank exits with 0 when torchrun ends it"
    *_, cause, _ = report.splitlines()
    assert 'did you mean "rollout.group_size"' in cause, (
        "the cause is the last line above torchrun's frame"
    )
    assert not (workplace / "other").exists()


def test_a_reward_function_of_the_users_trains_and_its_failures_are_told(
    arithmetic: Path, tmp_path: Path
) -> None:
    """Every second of its calls fails.

    The run goes on, warns, and names a file with one of them."""
    functions = tmp_path / "functions"
    functions.mkdir()
    (functions / "half_broken.py").write_text(
        "from pathlib import Path\n"
        "calls = Path(__file__).with_name('calls')\n"
        "def reward(completion, solutions, row):\n"
        "    with calls.open('a') as file:\n"
        "        file.write('x')\n"
        "    if calls.stat().st_size % 2 == 0:\n"
        "        raise ValueError('even')\n"
        "    return float(len(completion)), {'length': len(completion)}\n"
    )
    folder = tmp_path / "own"
    overrides = small_run(arithmetic, folder)
    function_settings = (
        "parallel.tensor=1",
        "run.total_steps=3",
        "reward.function=half_broken:reward",
        "reward.function_failure=-1",
    )
    process = run_ranks(1, [*TRAIN, *overrides, *function_settings], path=functions)
    row, *later = metric_rows(folder)
    assert 0 < row["reward/failures"] < 1
    assert row["reward/failures"] + row["reward/verdict/function"] == pytest.approx(1.0)
    assert row["reward/own/length"] > 0
    assert row["task_reward"] == pytest.approx(
        row["reward/own/length"] * row["reward/verdict/function"] - row["reward/failures"]
    )
    failures_file = folder / "samples" / "failure-000001.jsonl"
    console = process.stderr + process.stdout
    assert (
        console.count("could not be judged") == 1
        and str(failures_file) in console
        and "reward.function_failure=-1" in console
    )
    assert all(
        abs(later_row["reward/failures"] - row["reward/failures"]) <= 0.2 for later_row in later
    ), "it is no news"
    assert (folder / "run.log").read_text().count("could not be judged") == 3
    failure = json.loads(failures_file.read_text())
    assert any(
        "ValueError: even" in completion["extracted"] for completion in failure["completions"]
    )


def test_a_function_of_the_users_says_which_groups_are_learned_from(
    arithmetic: Path, tmp_path: Path
) -> None:
    """Others are sampled in the place of those that it drops."""
    (tmp_path / "own.py").write_text(
        "from rlmath import hooks\n\n"
        '@hooks.selection("odd")\n'
        "def odd(group):\n    return int(group.row['query_id'].rpartition('-')[2]) % 2 == 1\n"
    )
    folder = tmp_path / "run"
    selection = (
        "parallel.tensor=1",
        "run.total_steps=1",
        "optimizer.warmup_steps=0",
        f"run.plugins=[{tmp_path}/own.py]",
        "selection.dynamic_sampling=odd",
        "selection.max_extra_prompts=99",
        "telemetry.sample_groups_per_step=100",
        "telemetry.capture_steps=[1]",
    )
    run_ranks(1, [*TRAIN, *small_run(arithmetic, folder), *selection])
    (row,) = metric_rows(folder)
    lines = (folder / "samples" / "step-000001.jsonl").read_text().splitlines()
    numbers = [int(json.loads(line)["prompt_id"].rpartition("-")[2]) for line in lines]
    odd = sum(number % 2 for number in numbers)
    assert odd == row["selection/groups_learned"] == PER_STEP
    assert len(numbers) - odd == row["selection/dropped/rule"] > 0
    captured = read_capture(folder / "captures" / "step-000001")
    assert len(captured.groups) == len(numbers), "those that were dropped, too"


def test_a_run_says_that_its_model_cannot_be_written(arithmetic: Path, tmp_path: Path) -> None:
    """It is finished; started again, it finds a disk mounted where it writes its model anew."""
    with small_disk(tmp_path / "tried"):
        pass  # skips the test where mounting is not allowed
    folder = tmp_path / "run"
    settings = ("parallel.tensor=1", "run.total_steps=1", "optimizer.warmup_steps=0")
    command = [*TRAIN, *small_run(arithmetic, folder), *settings]
    assert f"The trained model is in {folder}/hf_model\n" in run_ranks(1, command).stderr
    with small_disk(folder / "hf_model.partial"):
        console = run_ranks(1, command, expect=FAILURE).stderr
    assert "made all 1 steps, and its model cannot be written" in console
    assert "The trained model is in" not in console


def test_a_run_that_is_asked_to_stop_while_it_starts_makes_no_step(
    arithmetic: Path, tmp_path: Path
) -> None:
    """The processes that judge answers are started before the engine is.

    The first of them sends the signal."""
    (tmp_path / "stops.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "rank = os.getppid()\n"
        "status = Path(f'/proc/{rank}/status').read_text()\n"
        "caught = int(status.partition('SigCgt:')[2].split()[0], 16)\n"
        "if caught >> signal.SIGTERM - 1 & 1:\n"
        "    os.kill(rank, signal.SIGTERM)\n"
        "def reward(completion, solutions, row):\n"
        "    return 1.0\n"
    )
    folder = tmp_path / "run"
    settings = ("parallel.tensor=1", "run.total_steps=2", "reward.function=stops:reward")
    command = [*TRAIN, *small_run(arithmetic, folder), *settings]
    console = run_ranks(1, command, expect=SAVED_AND_STOPPED, path=tmp_path).stderr
    assert "stopped by SIGTERM before the end of its first step: nothing was saved" in console
    assert not (folder / "checkpoints").exists()


def test_a_run_that_holds_more_memory_than_it_may_ends(arithmetic: Path, tmp_path: Path) -> None:
    """A threshold of a few bytes is passed as soon as steps are compared."""
    folder = tmp_path / "run"
    memory = (
        "parallel.tensor=1",
        "run.total_steps=6",
        "memory.stop_on_leak=true",
        "memory.leak_threshold_mib=0.00001",
    )
    command = [*TRAIN, *small_run(arithmetic, folder), *memory]
    console = run_ranks(1, command, expect=FAILURE).stderr
    assert "memory.stop_on_leak ends the run; raise memory.leak_threshold_mib (9.5" in console
    assert 0 < len(metric_rows(folder)) < 6


@pytest.mark.parametrize("ranks", [1, two_ranks(pytest.mark.full)])
def test_a_reward_function_that_fails_on_every_answer_ends_the_run_and_corrected_can_resume(
    arithmetic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """It works for the trial call of rank 0 and for step 1."""
    functions = tmp_path / "fails"
    folder = tmp_path / "no-rewards"
    functions.mkdir()
    source = (
        "from pathlib import Path\n"
        "calls = Path(__file__).with_name('calls')\n"
        "def reward(completion, solutions, row):\n"
        "    print('called')\n"
        "    with calls.open('a') as file:\n"
        "        file.write('x')\n"
        "    return len(completion) if calls.stat().st_size <= LAST else row['no such column']\n"
    )
    file = functions / "steps.py"
    file.write_text(source.replace("LAST", "1 + 32"))
    function_settings = (
        f"parallel.tensor={ranks}",
        "run.total_steps=2",
        f"reward.function={file}:reward",
    )
    overrides = (*small_run(arithmetic, folder), *function_settings)
    console = run_ranks(ranks, [*TRAIN, *overrides], expect=MISTAKE).stderr
    assert (
        "ended in step 2, of which nothing was learned: reward.function failed on all of 32 "
        "completions" in console
    )
    assert (
        "KeyError: 'no such column'" in console and f'File "{file}", line 7, in reward' in console
    )
    assert "Correct the function: the same command resumes after step 1" in console
    assert "reward.function prints: called" in console
    exit_status = read_exit_status(folder)
    assert exit_status.status == MISTAKE and "KeyError: 'no such column'" in exit_status.message
    assert len(metric_rows(folder)) == 1
    file.write_text(source.replace("LAST", "10**6"))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    recovery = prepare_grpo(load_config([REPOSITORY / "configs" / "demo.yaml"], overrides)).recovery
    assert recovery is not None and [checkpoint.step for checkpoint, _ in recovery.candidates] == [
        1
    ]
    (warning,) = recovery.warnings
    assert "has changed since the checkpoint of step 1" in warning


def test_a_reward_function_that_is_late_on_every_call_ends_the_run_without_a_model(
    arithmetic: Path,
) -> None:
    functions = arithmetic / "late"
    folder = arithmetic / "late-run"
    functions.mkdir()
    (functions / "slow.py").write_text("import time\ndef reward(*_):\n    time.sleep(60)\n")
    function_settings = (
        "parallel.tensor=1",
        "run.total_steps=3",
        f"reward.function={functions / 'slow.py'}:reward",
        "reward.timeout_seconds=0.2",
    )
    overrides = (*small_run(arithmetic, folder), *function_settings)
    console = run_ranks(1, [*TRAIN, *overrides], expect=MISTAKE).stderr
    assert (
        "reward.function failed on all completions of two steps in a row: on 32 of 32 it took more"
        in console
    )
    assert read_exit_status(folder).status == MISTAKE
    assert len(metric_rows(folder)) == 1 and not (folder / "hf_model").exists()
    (row,) = metric_rows(folder)
    assert row["rollout/accuracy"] < 1, "what the verifier says of the demo's slips"


def replay_by_command(folder: Path, *more: str, expect: int = 0) -> tuple[dict, str]:
    """What the replay of the run's captured step wrote, and its console."""
    process = run("-m", "rlmath.cli.main", "replay", str(folder), *more, expect=expect)
    paths = re.findall(r"\S+/replay\.json", process.stderr)
    return json.loads(Path(paths[0]).read_text()) if paths else {}, process.stderr


@with_two_ranks
@pytest.mark.parametrize("layout", [(2, 1, 1), pytest.param((4, 2, 2), marks=pytest.mark.full)])
def test_a_captured_step_is_the_same_in_another_layout(
    workplace: Path, tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    ranks, tensor, pipeline = layout
    layout_settings = (f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}")
    comparison, _ = replay_by_command(
        workplace / "run", "--ranks", str(ranks), *layout_settings, "--output", str(tmp_path)
    )
    assert len(list(tmp_path.glob("*/replay.json"))) == 1
    assert comparison["same"] and comparison["start"] == "equal" and not comparison["bit_equal"]
    ordered = sorted(comparison["differences"], key=lambda one: one["relative"])
    relative = {
        difference["name"]: difference["relative"] for difference in ordered
    }  # the largest of each
    assert max(relative.pop(name) for name in ("mismatch_max", "grad_norm")) < 1e-4
    assert max(relative.values()) < 1e-5


def test_the_rollout_of_a_captured_step_is_made_again_token_by_token(workplace: Path) -> None:
    """The engine alone makes it, from the checkpoint; the user's function gives the rewards."""
    make_again = partial(replay, 1) if workplace.name == "TP1" else replay_by_command
    _, refusal = make_again(workplace / "run", "--part", "rollout", expect=MISTAKE)
    assert "tests.reward_by_hash:reward" in refusal and "--with-functions" in refusal
    comparison, _ = make_again(workplace / "run", "--part", "rollout", "--with-functions")
    total = PER_STEP * GROUP
    assert (
        comparison["same_tokens"]
        == comparison["same_rewards"]
        == comparison["completions"]
        == total
    )
    assert comparison["logprobs_apart"] == 0
    folder = workplace / "run" / "captures" / "step-000002" / "replays"
    assert list(folder.glob("rollout-*/replay.json")) and not list(folder.glob("rollout-*/model"))
