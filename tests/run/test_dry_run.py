"""launch/train_grpo.py --dry-run: what it refuses, and with which words; what it prints."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from launch.train_grpo import main
from rlmath.checkpoint.directory import Progress, finish_partial, open_partial, write_progress
from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.config.load import load_config, save_config
from rlmath.config.run_files import CHECKPOINTS_FOLDER
from rlmath.config.schema import Config, SaveConfig
from rlmath.distributed.memory import total_bytes
from rlmath.planning import machine_room
from rlmath.planning.checks import check_config
from rlmath.run.dry_run import (
    checkpoint_disk,
    kept_checkpoints,
    needed_disk,
    plan_lines,
    plan_run,
)
from tests.terminal import on_terminal
from tests.tiny_models import make_model_folder
from tests.tool_models import make_chat_script_model, make_script_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL_R1 = "areal/1.5b_n1.yaml"
V2 = "simplerl/v2.yaml"
DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 problems in AReaL-boba's form, the last one of 57 characters, the others of 9."""
    file = tmp_path_factory.mktemp("data") / "boba.jsonl"
    problems = [f"Add {n:03}+1" for n in range(599)] + [
        "Add 1 to the number that comes before six hundred, please"
    ]
    lines = [
        json.dumps(
            {"prompt": text, "task": "math", "query_id": f"q{n}", "solutions": ["\\boxed{1}"]}
        )
        for n, text in enumerate(problems)
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture
def dry(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Exit status, stdout and stderr of a dry run of a recipe with those rows."""

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        common = [
            f"data.train_path={rows}",
            "data.format=boba",
            f"run.output_dir={tmp_path / 'run'}",
        ]
        status = main(["--config", str(CONFIGS / name), "--dry-run", *common, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def bare_model(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and tokenizer of a tiny model with 256 positions, without weights."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(tied_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return make_model_folder(folder, architecture="Qwen3MoeForCausalLM")


TINY = """
data.prompts_per_step=100 data.max_prompt_tokens=32 rollout.max_new_tokens=64 policy.max_tokens_per_microbatch=256
parallel.data=2 memory.gpu=null run.device=cpu
""".split()


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (
            (*TINY, "reward.function=math:sqrt"),
            [
                "reward.function math:sqrt fails on the first row of the training data ('q0')",
                "TypeError: math.sqrt",
            ],
        ),
        (
            ["model.path=/nowhere/DeepSeek-R1-Distil-Qwen-1.5B"],
            ["there is no folder", 'Did you mean "DeepSeek-R1-Distill-Qwen-1.5B"?'],
        ),
        (
            ["--ranks", "16"],
            ["parallel.data is 8;", "makes 8 ranks, and this run has 16", "parallel.data=null"],
        ),
        (["--ranks", "0"], ["--ranks is 0; needed: at least 1."]),
        (
            ["data.prompts_per_step=601"],
            ["data.prompts_per_step is 601, but only 600 prompts are left"],
        ),
    ],
)
def test_what_could_not_start_is_refused_with_its_reason(
    dry, arguments: list[str], reasons: list[str]
):
    status, out, err = dry(SMALL_R1, *arguments)
    assert (status, out) == (2, "")
    assert [reason for reason in reasons if reason not in err] == []


def test_solutions_that_are_not_beside_areal_v01s_prompts_are_missed(dry, tmp_path: Path):
    prompts = tmp_path / "prompts_for_r1_distilled.jsonl"
    prompts.write_text('{"prompt": "Add 1+1", "query_id": "q1"}\n', encoding="utf-8")
    status, _, err = dry(
        "areal/v0.1_1.5b_stages.yaml", f"data.train_path={prompts}", "data.format=areal_v01"
    )
    assert status == 2 and "id2info.json" in err


def test_only_config_json_is_needed_of_the_model(dry, bare_model: Path, tmp_path: Path):
    config_only = tmp_path / "alone"
    config_only.mkdir()
    shutil.copy(bare_model / "config.json", config_only)
    status, out, err = dry(SMALL_R1, f"model.path={config_only}", *TINY)
    assert (status, err) == (0, "")
    assert "600 rows" in out and "lengths were not checked" in out and "published shape" not in out
    assert "a start needs more of the model:" in out and "neither model.safetensors" in out


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def test_a_broken_model_is_refused_as_by_a_start(dry, tied_model: Path, rows: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tied_model, folder)
    model = (f"model.path={folder}", *TINY)
    assert dry(SMALL_R1, *model)[0] == 0
    cut_weights(folder)
    status, out, err = dry(SMALL_R1, *model)
    assert (status, out) == (2, "") and err.startswith("1 problem with this run:")
    assert 'model.safetensors" is not a whole safetensors file' in err and str(folder) in err
    data_settings = (f"data.train_path={rows}", f"run.output_dir={tmp_path / 'run'}")
    with pytest.raises(ValueError) as error:
        check_config(load_config([CONFIGS / SMALL_R1], [*data_settings, *model]), 2)
    assert str(error.value) == err.removesuffix("\n")


def test_a_reward_function_that_takes_too_long_is_worth_knowing(
    dry, bare_model: Path, tmp_path: Path
):
    (tmp_path / "hangs.py").write_text("import time\ndef reward(*_):\n    time.sleep(600)\n")
    slow_reward = (f"reward.function={tmp_path / 'hangs.py'}:reward", "reward.timeout_seconds=0.5")
    status, out, _ = dry(SMALL_R1, *TINY, f"model.path={bare_model}", *slow_reward)
    assert status == 0
    assert (
        "  - reward.function took more than reward.timeout_seconds=0.5"
        in out.partition("Worth knowing:")[2]
    )


def test_a_gpu_that_is_not_here(dry, bare_model: Path, monkeypatch: pytest.MonkeyPatch):
    """Refused as by a start, or a plan for another machine where its GPU is named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = (*TINY, f"model.path={bare_model}", "run.device=cuda")
    status, _, err = dry(SMALL_R1, *settings)
    assert status == 2 and "torch finds no CUDA device" in err and "name it by memory.gpu" in err
    status, out, _ = dry(SMALL_R1, *settings, "memory.gpu=H100-80GB")
    assert status == 0 and "a start on this machine would be refused: run.device is" in out
    assert "No problem was found, but a start on this machine would be refused." in out


@pytest.mark.parametrize(("dtype", "planned"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_a_plan_for_the_cpu_names_its_number_format(
    dry, bare_model: Path, dtype: str, planned: str
):
    settings = ("memory.gpu=null", "run.device=cpu", f"policy.dtype={dtype}")
    status, out, err = dry(SMALL_R1, *TINY, f"model.path={bare_model}", *settings)
    assert status == 0, err
    assert f"the plan is for the CPU, in {planned};" in out


def test_a_terminal_sees_that_it_begins_and_lines_wrapped_between_words(
    dry, bare_model: Path, rows: Path, tmp_path: Path
):
    plain = dry(SMALL_R1, *TINY, f"model.path={bare_model}")[1]
    arguments = [
        "--config",
        str(CONFIGS / SMALL_R1),
        "--dry-run",
        *TINY,
        f"model.path={bare_model}",
    ]
    data_settings = [
        f"data.train_path={rows}",
        "data.format=boba",
        f"run.output_dir={tmp_path / 'run'}",
    ]
    program = f"from launch.train_grpo import main; main({[*arguments, *data_settings]!r})"
    terminal_text = on_terminal(program, 80).replace("\r\n", "\n")
    first_line, _, terminal_text = terminal_text.partition("\n")
    assert first_line == "Reading the settings, the model and the data ..."
    long_lines = [
        line
        for line in terminal_text.splitlines()
        if len(line) > 80 and str(tmp_path.parent) not in line
    ]
    assert not long_lines and max(map(len, plain.splitlines())) > 80
    without_seconds = [
        re.sub(r"\d\.\d s|[\d.]+ GiB free", "", text).split() for text in (terminal_text, plain)
    ]
    assert without_seconds[0] == without_seconds[1]


def test_a_call_of_the_tool_is_drawn_behind_the_first_prompt(dry, tmp_path: Path):
    model = make_script_model(tmp_path / "script", positions=256)
    tools = ("tools.max_calls=2", "tools.max_output_tokens=64", "tools.isolation=none")
    status, out, err = dry(
        SMALL_R1, *TINY, f"model.path={model}", "data.template=raw", "tools.format=fence", *tools
    )
    assert status == 0, err
    _, line, drawn = out.partition(
        "Tool: Python in fences, 2 calls of a completion at most, each with up to 64 tokens of "
        "output; isolation none, state session\n"
    )
    assert line and "32 + 64 + 160 = 256, of which up to 160 are not sampled, packed into" in out
    drawn_lines = [line.split() for line in drawn.splitlines()[1:6]]
    prompt, call, code, output, answer = ("".join(words).replace("│", "") for words in drawn_lines)
    assert prompt == "promptAdd000+1"
    assert call + code == "*sampledWecomputeit.↵```python↵print(6*7)↵```"
    assert output == "given↵```output↵42↵```↵" and answer.startswith("*sampled")


def test_a_call_in_a_chat_is_drawn_behind_a_prompt_that_shows_the_tool(dry, tmp_path: Path):
    model = make_chat_script_model(tmp_path / "chat", positions=2048)
    lengths = ("data.max_prompt_tokens", "policy.max_tokens_per_microbatch")
    tiny = [setting for setting in TINY if not setting.startswith(lengths)]
    settings = [
        *tiny,
        f"model.path={model}",
        "data.max_prompt_tokens=1000",
        "policy.max_tokens_per_microbatch=2048",
        "tools.format=chat",
        "tools.max_calls=2",
        "tools.max_output_tokens=64",
        "tools.isolation=none",
    ]

    def drawn_in(template: str) -> tuple[int, str, str]:
        return dry(SMALL_R1, *settings, f"data.template={template}")

    status, out, err = drawn_in("chat")
    assert status == 0, err
    _, line, drawn = out.partition("Tool: Python in the form of the chat template, 2 calls of a ")
    assert line and "sequences of at most 1000 + 64 + 256 = 1320" in out
    text = "".join(drawn.split()).replace("│", "")
    assert 'Youhelp.↵{"type":"function"' in text
    assert '*sampled<tool_call>↵{"name":"python","arguments":{"code":"print(6*7)"}}' in text
    assert "</tool_call><|im_end|>given↵<|im_start|>user↵<tool_response>↵42↵↵</tool_res" in text
    assert "<|im_start|>assistant↵*sampled" in text
    status, _, err = drawn_in("raw")
    assert status != 0 and "does not show the tool" in " ".join(err.split())


def test_the_data_are_looked_at(dry, tied_model: Path, tmp_path: Path):
    sums = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(200)]
    sums[1]["answer"] = sums[2]["answer"] = "see solution"
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, sums)))
    training = (
        f"model.path={tied_model}",
        *TINY,
        "data.format=auto",
        f"data.train_path={file}",
        "data.template=raw",
    )
    validation = ("validation.every_steps=2", f"validation.paths=[{file}]")
    status, out, _ = dry(SMALL_R1, *training, *validation)
    plan, _, notes = out.partition("Worth knowing:")
    assert (
        status == 0
        and "A prompt as the model reads it: '0' of" in plan
        and "row        0│+│1│?│\n" in plan
    )
    assert '200 of the 200 problems of validation "sums" are trained on, too' in notes
    note = (
        "2: the reference says that the answer is elsewhere ('1': 'see solution', '2': 'see "
        "solution')\n"
    )
    assert notes.count(note) == 2, "of training, and of validation"


def test_with_a_tokenizer_prompts_are_filtered_by_their_tokens(dry, bare_model: Path, rows: Path):
    status, out, _ = dry(SMALL_R1, f"model.path={bare_model}", *TINY)
    assert status == 0 and "lengths were not checked" not in out
    assert "600 read, 599 kept; dropped: 1 longer" in out
    assert "Steps: 25 in all, 5 an epoch (5 epochs)" in out


def test_a_warning_where_filters_drop_much(dry, bare_model: Path):
    tight = ("telemetry.warn_dropped=0.001",)
    status, out, _ = dry(SMALL_R1, f"model.path={bare_model}", *TINY, *tight)
    assert (
        status == 0
        and "of the prompts are dropped before the start" in out.partition("Worth knowing:")[2]
    )


def test_the_plan_of_a_recipe(dry):
    status, out, err = dry(SMALL_R1)
    assert (status, err) == (0, "")
    sequences = 512 * 16
    tokens = 512 * 16 * (1024 + 27648)
    for line in (
        "Model: /storage/models/DeepSeek-R1-Distill-Qwen-1.5B, 1.78 B parameters, 28 layers, "
        "131072 positions",
        "Layout: 8 ranks, TP1 x PP1 x DP8, 8 engines of TP1",
        f"Step: 512 prompts x 16 completions = {sequences:,} sequences",
        "4 minibatches x 1 epoch over them: 4 updates a step, 20 in all at most",
        f"at most {tokens:,} tokens a step",
        "Steps: 5 in all, 1 an epoch (5 epochs)",
        "on H800-80GB, may fill 72.94 GiB:",
        "a checkpoint is 23.2 GiB, the exported model 3.3",
    ):
        assert line in out
    phases = [line.strip().partition(":")[0] for line in out.splitlines() if " GiB (" in line]
    assert phases == ["sync", "generate", "logprobs", "update"]


def test_the_plan_says_how_many_completions_are_sampled_and_learned_from(dry):
    status, out, _ = dry(
        SMALL_R1, "tools.format=fence", "tools.max_calls=2", "selection.resample_to=8"
    )
    assert status == 0 and "Step: 512 prompts x 16 completions = 8,192 sequences\n" in out
    assert "  8 of the 16 are learned from, 4,096 sequences a step: of right answers those" in out


def test_the_plan_of_a_critic_on_32_gpus(dry):
    """A 7B critic beside a 7B policy does not fit as the recipe has it.

    It does where it is offloaded."""
    critic = [
        "--config",
        str(CONFIGS / "algorithms" / "critic.yaml"),
        "--ranks",
        "32",
        "memory.gpu=H100-80GB",
    ]
    status, _, errors = dry("areal/7b_n4.yaml", *critic)
    assert (
        status == 2
        and 'in the phase "generate"' in errors
        and "Set memory.offload_critic=true." in errors
    )
    status, out, errors = dry("areal/7b_n4.yaml", *critic, "memory.offload_critic=true")
    assert status == 0, errors
    assert "a critic of 7.07 B parameters learns from the same minibatches" in out
    (line,) = (line for line in out.splitlines() if line.startswith("  critic: "))
    assert "critic_gradients 13.17" in line and "critic_optimizer 2.47" in line
    assert "activations 3.08" in line and "logits" not in line, (
        "a backward pass, to a single output"
    )


def test_stages_have_lines_of_their_own(dry, rows: Path):
    stages = ("stages.steps=[3,4]", "stages.max_new_tokens=[100,27648]")
    status, out, _ = dry(SMALL_R1, *stages)
    assert status == 0 and "Steps: 7 in all, 1 an epoch (7 epochs)" in out
    assert "Stage 1 of 2: steps 1 to 3" in out and "Stage 2 of 2: steps 4 to 7" in out
    assert f"at most {512 * 16 * 1124:,} tokens a step" in out
    assert f"at most {512 * 16 * 28672:,} tokens a step" in out


def test_partial_rollouts_are_told(dry):
    loss = "algorithm.recompute_logprobs=true", "algorithm.importance_correction=token"
    carry = ("rollout.tail=carry", *loss, "algorithm.importance_cap=2")
    status, out, err = dry(SMALL_R1, *carry, "rollout.max_staleness=3")
    assert status == 0, err
    expected = (
        "partial rollouts: slices of 6,912 tokens, at most 2,048 groups in flight, learned "
        "from within 3 steps"
    )
    assert expected in " ".join(out.split())
    assert "partial rollouts" not in dry(SMALL_R1)[1]


@pytest.mark.parametrize(
    ("replay", "told"),
    [
        ("none", 'policy.routing_replay="none" with a mixture of experts'),
        ("engine", "replays the experts that the engines chose, 8 bytes a token"),
    ],
)
def test_a_mixture_is_told_what_it_replays_or_what_it_risks(
    dry, mixture: Path, replay: str, told: str
) -> None:
    """4 layers with 2 experts of a token."""
    status, out, err = dry(
        SMALL_R1, f"model.path={mixture}", f"policy.routing_replay={replay}", *TINY
    )
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert told in text and ("with a mixture of experts" in text) == (replay == "none")


def test_groups_in_flight_count_for_the_disk(dry):
    """There are three checkpoints at most, each with 1.6875 GiB of groups.

    That is 512 groups x 16 completions x 27,648 tokens x 8 bytes."""
    loss_settings = ("algorithm.recompute_logprobs=true", "algorithm.importance_correction=token")
    settings = (
        *loss_settings,
        "algorithm.importance_cap=2",
        "save.save_freq_epochs=null",
        "save.save_freq_steps=null",
    )

    def needed(*overrides: str) -> float:
        out = dry(SMALL_R1, *settings, "save.keep_last=2", *overrides)[1]
        return float(re.findall(r"needed at most ([\d.,]+) GiB", out)[0].replace(",", ""))

    assert needed("rollout.tail=carry") - needed() == pytest.approx(3 * 1.6875, abs=0.11)
    assert needed("rollout.tail=defer") == needed()


def test_routes_that_are_carried_count_for_the_disk_of_each_checkpoint(
    mixture: Path, rows: Path, tmp_path: Path
) -> None:
    """100 groups x 4,096 completions are carried, each of 96 tokens but its last, of 8 bytes."""
    settings = (
        f"data.train_path={rows}",
        "data.format=boba",
        f"run.output_dir={tmp_path / 'run'}",
        f"model.path={mixture}",
        *TINY,
        "rollout.group_size=4096",
        "algorithm.recompute_logprobs=true",
        "algorithm.importance_correction=token",
        "algorithm.importance_cap=2",
        "rollout.tail=carry",
    )

    def told(replay: str, *more: str) -> tuple[int, int]:
        replays = f"policy.routing_replay={replay}"
        plan = plan_run(load_config([CONFIGS / SMALL_R1], [*settings, replays, *more]))
        shown = f"a checkpoint is {checkpoint_disk(plan) / 2**30:,.1f} GiB"
        assert any(shown in line for line in plan_lines(plan))
        return checkpoint_disk(plan), needed_disk(plan)

    plain, plain_needed = told("none")
    replayed, needed = told("engine")
    assert replayed - plain == 100 * 4096 * (96 - 1) * 8
    assert needed - plain_needed == 8 * (replayed - plain)
    steps = "telemetry.capture_steps=[1,3]"
    assert told("none", steps)[1] == plain_needed
    assert told("engine", steps)[1] - needed == 2 * 100 * 4096 * (96 - 1) * 8


def test_a_disk_that_has_exactly_the_room_is_large_enough(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the run is not there yet: the disk is that of the one above it."""
    asked: list[Path] = []
    output = tmp_path / "run"
    overrides = [f"data.train_path={rows}", "data.format=boba", f"run.output_dir={output}"]
    plan = plan_run(load_config([CONFIGS / SMALL_R1], overrides))
    needed = needed_disk(plan)

    def told(free: int) -> bool:
        def usage(path: Path) -> DiskUsage:
            asked.append(path)
            return DiskUsage(2**60, 0, free)

        monkeypatch.setattr(shutil, "disk_usage", usage)
        text = f'the disk of "{output}" has {free / 2**30:,.1f} GiB free'
        return any(text in line for line in plan_lines(plan))

    assert needed > 2**30 and [told(needed), told(needed - 1)] == [False, True]
    assert set(asked) == {tmp_path}


ASYNC = (
    "parallel=d2t2+d4",
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_correction=token",
    "algorithm.importance_cap=2",
)


def test_asynchronous_runs_are_told(dry):
    status, out, err = dry(
        SMALL_R1, *ASYNC, "rollout.max_staleness=2", "rollout.max_concurrent_sequences=100"
    )
    assert status == 0, err
    plan = " ".join(out.split())
    assert (
        "Layout: 8 ranks, TP1 x PP1 x DP4, 2 engines of TP2 on ranks of their own ranks 0-3 "
        "train, ranks 4-7" in plan
    )
    assert "1,536 groups at most are begun before the first step, 512 more after each" in plan
    assert "learned from within 2 steps of their first token" in plan
    assert (
        "Planned memory of rank 0 (pipeline stage 0)" in out
        and "Planned memory of engine rank 4 on" in out
    )
    colocated = dry(SMALL_R1)[1]
    assert (
        "asynchronous:" not in colocated
        and "engine rank" not in colocated
        and "train, ranks" not in colocated
    )


def test_of_engines_with_ranks_of_their_own_only_these_have_caches(dry, bare_model: Path):
    cache = f"rollout.cpu_kv_cache_gib={0.26 * total_bytes() / 2**30}"
    settings = (
        f"model.path={bare_model}",
        *TINY,
        "run.total_epochs=2",
        cache,
        "parallel=d1+d3",
        "rollout.max_staleness=0",
    )
    status, out, err = dry(V2, *settings)
    assert status == 0, err
    assert "the KV caches of" not in out
    assert "the KV caches of 4 ranks" in dry(V2, *settings, "parallel=d4+d3")[1]


def test_tail_batching_and_its_bias_are_told(dry):
    status, out, err = dry(SMALL_R1, "rollout.tail=defer")
    assert status == 0, err
    plan = " ".join(out.split())
    assert (
        "tail batching: groups with a completion of more than 13,824 tokens are sampled anew"
        in plan
    )
    assert "in steps of their own; what that biases: docs/algorithm.md" in plan
    assert "tail batching" not in dry(SMALL_R1)[1]


def test_epochs_that_end_before_the_steps_are_worth_knowing(dry, bare_model: Path):
    """599 prompts, 100 a step."""
    settings = (f"model.path={bare_model}", *TINY, "run.total_epochs=2")
    status, out, err = dry(V2, *settings, "run.total_steps=13")
    assert status == 0, err
    assert (
        "run.total_steps is 13, and the run ends after 10 steps" in out
        and "run.total_epochs=3." in out
    )
    assert "the run ends after" not in dry(V2, *settings, "run.total_steps=10")[1]


@pytest.mark.parametrize(
    "override",
    [
        "data.format={own}:nothing",
        "data.template={own}:nothing",
        "validation.template={own}:nothing",
        "run.plugins=[{folder}/broken.py]",
    ],
)
def test_a_function_without_which_nothing_can_be_read_is_told_once(
    bare_model: Path, rows: Path, tmp_path: Path, override: str
) -> None:
    (tmp_path / "own.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    settings = [
        *TINY,
        f"model.path={bare_model}",
        f"data.train_path={rows}",
        "data.format=boba",
        f"run.output_dir={tmp_path / 'run'}",
        "validation.every_steps=2",
        f"validation.paths=[{rows}]",
        override.format(own=tmp_path / "own.py", folder=tmp_path),
    ]
    with pytest.raises(ValueError, match="1 problem with this run:") as error:
        plan_run(load_config([CONFIGS / SMALL_R1], settings))
    assert override.partition("=")[0] in str(error.value)


def test_a_learning_rate_is_compared_with_the_models_size(dry) -> None:
    text = "optimizer.lr=0.001 is legal, and hardly what you mean for a model of 1.78 B parameters"
    assert text in dry(SMALL_R1, "optimizer.lr=1e-3")[1].partition("Worth knowing:")[2]
    assert "hardly what you mean for a model" not in dry(SMALL_R1)[1]


def test_a_supervised_run_has_no_caches_for_which_memory_could_be_short(
    bare_model: Path, tmp_path: Path
) -> None:
    """The default's caches of so many ranks would not fit."""
    ranks = int(total_bytes() / 2**30 / Config().rollout.cpu_kv_cache_gib) + 2
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(f'{{"prompt": "{n}+1=", "completion": "2"}}' for n in range(ranks)))
    settings = [
        f"model.path={bare_model}",
        f"data.train_path={file}",
        f"run.output_dir={tmp_path / 'run'}",
        f"data.prompts_per_step={ranks}",
        "sft.held_out_share=0",
        "sft.max_sequence_tokens=64",
        "run.device=cpu",
    ]
    plan = plan_run(load_config([], settings), ranks, "sft", oversubscribe=True)
    lines = "\n".join(plan_lines(plan))
    assert "the plan is for the CPU" in lines and "the KV caches of" not in lines


def test_the_verdict_agrees_with_what_is_said_of_too_many_ranks(dry, bare_model: Path) -> None:
    settings = (
        f"model.path={bare_model}",
        *TINY,
        "memory.gpu=null",
        "run.device=cpu",
        "parallel.data=null",
    )
    ranks = 4 * len(os.sched_getaffinity(0)) + 60  # more than four a core
    settings = (*settings, "--ranks", str(ranks), f"data.prompts_per_step={ranks}")
    status, out, err = dry(SMALL_R1, *settings)
    assert status == 0, err
    warned, _, verdict = out.rstrip().rpartition("\n")
    assert f"a start on this machine would be refused: {ranks} ranks on " in warned
    assert verdict.startswith("No problem was found, but a start on this machine would be refused.")
    _, out, _ = dry(SMALL_R1, *settings, "--oversubscribe")
    assert "refused" not in out and f"--oversubscribe starts all ranks: {ranks} ranks on" in out
    assert "No problem was found, but this machine has no room for so many ranks." in out
    _, out, _ = dry(SMALL_R1, *settings, "memory.gpu=H100-80GB")
    assert "No problem was found." in out, "a plan for another machine"


def test_room_is_counted_for_what_ranks_hold_of_this_kind_of_run(
    bare_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervised run has no engines, whose caches are most of what a rank of GRPO holds."""
    file = tmp_path / "sums.jsonl"
    file.write_text(
        "\n".join(
            f'{{"prompt": "{n}+1=", "completion": "2", "question": "{n}+1=", "answer": "2"}}'
            for n in range(8)
        )
    )
    settings = [
        *(f"model.path={bare_model}", f"data.train_path={file}"),
        *(f"run.output_dir={tmp_path / 'run'}", "run.device=cpu", "data.prompts_per_step=4"),
        *("data.template=raw", "data.max_prompt_tokens=32", "rollout.max_new_tokens=16"),
        *("sft.max_sequence_tokens=64", "rollout.cpu_kv_cache_gib=3", "sft.held_out_share=0"),
    ]
    monkeypatch.setattr(machine_room, "total_bytes", lambda: 2 * 2**30)
    grpo_problems, sft_problems = (
        plan_run(load_config([], settings), 1, kind).not_here for kind in ("grpo", "sft")
    )
    (problem,) = grpo_problems
    assert "1 rank needs about" in problem and "this machine has 2.0" in problem
    assert sft_problems == ()


def test_without_a_number_of_ranks_the_least_are_planned(
    dry, bare_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    status, out, err = dry(
        SMALL_R1, f"model.path={bare_model}", *TINY, "parallel.data=null", "parallel.tensor=2"
    )
    assert (
        status == 0 and "Layout: 2 ranks" in out and "the least for this layout; --ranks N" in out
    ), err


def test_what_a_start_refuses_to_resume_a_dry_run_refuses(
    dry, tied_model: Path, tmp_path: Path
) -> None:
    """A run that became shorter, another model, other prompts; and what is resumed is told."""
    settings = (f"model.path={tied_model}", *TINY)
    output = tmp_path / "run"
    status = dry(SMALL_R1, *settings)[0]
    assert status == 0
    config = load_config(
        [CONFIGS / SMALL_R1], [f"run.output_dir={output}", "data.train_path=t", *settings]
    )

    def checkpoint(step: int, data: str) -> None:
        partial = open_partial(output / CHECKPOINTS_FOLDER, step)
        model = model_fingerprint(tied_model)
        libraries = ("torch",)
        versions = {"torch": "2"}
        progress = Progress(
            step, 0, 24, 6, 3, "TP1", 1, ("exp_avg",), libraries, model, data, versions
        )
        write_progress(partial, progress)
        save_config(config, partial / "config.yaml")
        (partial / "state" / ".metadata").write_text("index")
        finish_partial(partial, step, False, {})

    checkpoint(8, "another")
    save_config(config, output / "config.yaml")
    _, _, err = dry(SMALL_R1, *settings, "run.total_steps=4")
    assert err.startswith("1 problem with this run:") and err.count("cannot resume from") == 1
    assert "8 steps are done there, the run has 4 now" in err and "model.path: what" not in err
    match = re.search(
        r"data.train_path: what .* has changed \(fingerprint another of \S+ there, (\w+) of", err
    )
    assert match is not None
    checkpoint(9, match[1])
    shutil.rmtree(output / CHECKPOINTS_FOLDER / "step-000008")
    status, out, err = dry(SMALL_R1, *settings)
    assert status == 0 and "Resumes: after step 9" in out, err


@pytest.mark.parametrize(
    ("save", "kept"),
    [
        (SaveConfig(), 0),
        (SaveConfig(save_freq_steps=4), 3),
        (SaveConfig(save_freq_epochs=1), 2),
        (
            SaveConfig(save_freq_steps=4, save_freq_epochs=1),
            5,
        ),  # after steps 4, 6, 8 and, counted twice, 12
        (SaveConfig(save_freq_steps=4, keep_models=2), 2),
    ],
)
def test_checkpoints_that_are_kept(save: SaveConfig, kept: int):
    assert kept_checkpoints(Config(save=save), total_steps=12, steps_per_epoch=6) == kept
