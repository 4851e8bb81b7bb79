"""launch/train_sft.py as a user runs it: a model out, mistakes told, interrupted and continued."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import train_sft
from rlmath.config.load import load_config
from rlmath.data.micro_batches import training_cost
from rlmath.data.order import PromptOrder
from rlmath.data.sft_sequences import WrittenSequence, load_sequences, split_held_out
from rlmath.distributed.device import GPU_PACKAGES
from rlmath.distributed.fault_tolerance.exit_codes import read_exit_status
from rlmath.run.startup import prepare_sft
from tests.distributed.test_sft import loss_and_hits
from tests.forked_ranks import run_ranks
from tests.programs import REPOSITORY, metric_rows, rows, run, torchrun_command
from tests.tiny_models import shape_of

SFT = ("launch/train_sft.py", "--config", "configs/demo_sft.yaml")
STEPS = 4
TEMPLATE = "{% for one in messages %}{{ one.content }}\n{% endfor %}"
distributed = pytest.mark.distributed


def settings(place: Path, output: Path, *more: str) -> list[str]:
    return [
        f"run.output_dir={output}",
        f"model.path={place}/base",
        f"data.train_path={place}/data/worked.jsonl",
        "data.prompts_per_step=8",
        "sft.held_out_share=0.001",
        "sft.eval_every_steps=2",
        "optimizer.warmup_steps=1",
        "optimizer.decay=constant",
        "save.ckpt_freq_steps=1",
        f"save.keep_last={STEPS}",
        *more,
    ]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=distributed)])
def whole(
    arithmetic: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """An undisturbed run of four steps on one rank, or two under torchrun.

    Its console is beside it.

    There are packages of the names of those for GPUs, whose imports would be told on the console.
    """
    folder = tmp_path_factory.mktemp("sft") / f"DP{request.param}"
    packages = folder.with_name("packages")
    packages.mkdir()
    for name in GPU_PACKAGES:
        (packages / f"{name}.py").write_text(
            "import sys\nprint('IMPORTED', __name__, file=sys.stderr)\n"
        )
    template = folder.with_name("own.jinja")
    template.write_text(TEMPLATE)
    unused_settings = (
        "rollout.group_size=3",
        "algorithm.kl_coef=0.5",
        f"data.chat_template={template}",
    )
    command = [*SFT, *settings(arithmetic, folder, f"run.total_steps={STEPS}", *unused_settings)]
    if request.param == 1:
        process = run_ranks(1, command, path=packages)
    else:
        process = run(*torchrun_command(2, *command), path=packages)
    folder.with_suffix(".console.txt").write_text(process.stderr)
    return folder


def test_a_run_tells_its_numbers_and_leaves_a_model(arithmetic: Path, whole: Path) -> None:
    told_rows = rows(whole)
    assert [row["step"] for row in told_rows] == list(range(STEPS + 1))
    assert ["held_out/loss" in row for row in told_rows] == [True, False, True, False, True]
    for row in told_rows[1:]:
        assert row["n_seqs"] == 8 and row["n_tokens"] > row["n_valid_tokens"] > 0
        assert row["train/skipped_updates"] == 0 and row["train/grad_norm"] > 0
    assert told_rows[-1]["train/loss"] < told_rows[1]["train/loss"]
    console = whole.with_suffix(".console.txt").read_text()
    assert (
        "Without effect in supervised training: rollout.group_size, algorithm.kl_coef." in console
    )
    assert f"Layout: TP1 x PP1 x {whole.name}\n" in console
    assert "Held out: 20 sequences." in console
    assert re.search(r" step 4/4 loss \d+\.\d{4} held-out \d+\.\d{4} .*s left 0:00\n", console)
    assert not re.search(r"group_size=|kl_coef=", console), "what has no effect"
    log = (whole / "run.log").read_text()
    assert "INFO: step 4/4 loss " in log
    assert list((whole / "tensorboard").iterdir())
    summary = json.loads((whole / "summary.json").read_text())
    assert (
        summary["steps"] == STEPS
        and summary["held_out"]["held_out/loss"] == told_rows[-1]["held_out/loss"]
    )
    assert json.loads((whole / "data_report.json").read_text())["files"][0]["rows"] == 20000
    assert (whole / "unusable_rows.jsonl").read_text() == ""
    assert read_exit_status(whole).status == 0
    assert "data.chat_template does nothing for the whole prompts" in console
    for place in ("hf_model", f"checkpoints/step-{STEPS:06}/hf"):
        assert AutoTokenizer.from_pretrained(whole / place).chat_template == TEMPLATE


@pytest.mark.parametrize("whole", [pytest.param(2, marks=distributed)], indirect=True)
def test_on_cpu_a_run_imports_no_package_for_gpus(whole: Path) -> None:
    """Megatron would take Transformer Engine's optimizer for tensors on the CPU."""
    assert "IMPORTED" not in whole.with_suffix(".console.txt").read_text()


@pytest.fixture(scope="module")
def written(arithmetic: Path) -> tuple[list[WrittenSequence], list[WrittenSequence]]:
    """The sequences that the run learns, and those that are held out."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "base")
    sequences, _ = load_sequences(
        str(arithmetic / "data" / "worked.jsonl"),
        tokenizer,
        template="auto",
        limit=64,
        max_unusable_share=0.0,
    )
    return split_held_out(sequences, 0.001, seed=1)


def test_the_exported_model_has_the_held_out_loss_that_was_told(
    whole: Path, written: tuple[list[WrittenSequence], list[WrittenSequence]]
) -> None:
    """Transformers finds it on the very sequences that were held out.

    Their texts are in no step's order."""
    model = AutoModelForCausalLM.from_pretrained(whole / "hf_model", dtype=torch.float32)
    with torch.no_grad():
        total, tokens, hits = loss_and_hits(model, written[1])
    last_row = rows(whole)[-1]
    assert last_row["held_out/loss"] == pytest.approx(float(total) / tokens, rel=1e-5)
    assert last_row["held_out/perplexity"] == pytest.approx(
        math.exp(float(total) / tokens), rel=1e-4
    )
    assert last_row["held_out/token_accuracy"] == pytest.approx(hits / tokens)


def test_the_figures_of_every_step_are_those_of_its_sequences(
    arithmetic: Path, whole: Path, written: tuple[list[WrittenSequence], list[WrittenSequence]]
) -> None:
    """The rank that tells them has packed only a part of a step's sequences.

    The first loss is that of the model that the run starts from."""
    order = PromptOrder(len(written[0]), 8, seed=1, shuffle=True)
    cost = training_cost(shape_of(arithmetic / "base"))
    peaks = []
    for number, row in enumerate(metric_rows(whole)[1:]):
        sequences = [written[0][index] for index in order.batch(number)[1]]
        prompts = sum(len(sequence.prompt_ids) for sequence in sequences)
        completions = sum(len(sequence.completion_ids) for sequence in sequences)
        assert (row["n_tokens"], row["n_valid_tokens"]) == (prompts + completions, completions)
        assert row["avg_seq_len"] == pytest.approx((prompts + completions) / 8)
        for phase in ("update", "step"):
            tokens = row[f"tokens_per_second/{phase}"] * row[f"seconds/{phase}"]
            assert tokens == pytest.approx(prompts + completions, rel=1e-4)
        flops = sum(cost.of(sequence.length) for sequence in sequences)
        peaks.append(flops / row["seconds/update"] / row["train/mfu"])
        assert row["train/learning_rate"] == pytest.approx(3e-3 / 2 if number == 0 else 3e-3)
        if number == 0:
            base = AutoModelForCausalLM.from_pretrained(arithmetic / "base", dtype=torch.float32)
            with torch.no_grad():
                total, n_learned, _ = loss_and_hits(base, sequences)
            assert row["train/loss"] == pytest.approx(float(total) / n_learned, rel=1e-5)
    assert peaks == pytest.approx([peaks[0]] * STEPS, rel=1e-4)


def told(*overrides: str) -> str:
    """What the program says to these settings before it starts anything."""
    with pytest.raises(ValueError) as error:
        prepare_sft(load_config([REPOSITORY / SFT[2]], list(overrides)))
    return str(error.value)


@pytest.fixture
def short(arithmetic: Path, tmp_path: Path) -> list[str]:
    """Settings of a run on 2,000 of the worked solutions."""
    rows = (arithmetic / "data" / "worked.jsonl").read_text().splitlines(keepends=True)[:2000]
    (tmp_path / "worked.jsonl").write_text("".join(rows))
    data_settings = (f"data.train_path={tmp_path}/worked.jsonl", "sft.held_out_share=0.01")
    return settings(arithmetic, tmp_path / "new", *data_settings)


def test_a_dry_run_tells_the_plan_or_all_mistakes_and_writes_nothing(
    arithmetic: Path, short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry(*more: str) -> tuple[int, str, str]:
        arguments = ["--config", str(REPOSITORY / SFT[2]), "--dry-run", "--ranks", "2"]
        status = train_sft.main([*arguments, *short, *more])
        return status, *capsys.readouterr()

    status, plan, problems = dry("data.prompts_per_step=64", "rollout.group_size=5")
    assert (status, problems) == (0, "")
    for line in (
        "Layout: 2 ranks, TP1 x PP1 x DP2",
        "Step: 64 sequences of at most 64 tokens, 4,096 in all, packed into micro-batches of "
        "4096; one update",
        "Held out: 20 sequences.",
        "Held-out sequences: their loss every 2 steps",
        "Steps: 60 in all, 30 an epoch (2 epochs)",
        "Without effect in supervised training: rollout.group_size.",
        "  update: ",
        "No problem was found.",
    ):
        assert line in plan
    assert "rollout: " not in plan and "generat" not in plan
    status, plan, problems = dry("sft.max_sequence_token=3")
    assert (status, plan) == (2, "") and 'did you mean "sft.max_sequence_tokens"?' in problems
    prompts = f"data.train_path={arithmetic}/data/train.jsonl"
    status, _, problems = dry(prompts)
    assert status == 2 and "200 of 200 rows cannot be used" in problems
    assert "needed: prompt and completion, question and solution" in problems
    assert not (tmp_path / "new").exists()


def test_a_dry_run_without_the_models_tokenizer_says_what_it_needs(
    arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(arithmetic / "base", bare, ignore=shutil.ignore_patterns("*token*", "vocab*"))
    sft_settings = settings(arithmetic, tmp_path / "new", f"model.path={bare}", "parallel.tensor=1")
    dry = ["--config", str(REPOSITORY / SFT[2]), "--dry-run", *sft_settings]
    assert train_sft.main(dry) == 2
    assert (
        f'"{bare}" has no tokenizer: neither tokenizer.json nor vocab.json'
        in capsys.readouterr().err
    )
    (bare / "model.safetensors").unlink()  # a folder of a model that lies elsewhere
    assert train_sft.main(dry) == 2
    assert f'"{bare}" has no tokenizer here' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("data.prompts_per_step=3000", "data.prompts_per_step is 3000, but only 1980"),
        ("sft.max_sequence_tokens=5", "all 2000 sequences that can be used are longer than"),
        ("optimizer.warmup_steps=494", "would never reach optimizer.lr"),
    ],
)
def test_data_and_settings_that_do_not_go_together_are_told(
    short: list[str], override: str, why: str
) -> None:
    assert why in told(*short, override)
