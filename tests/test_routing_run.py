"""A whole run of a mixture of experts that replays the experts of its engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rlmath.algorithms.types import PartialCompletion
from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, MISTAKE
from tests import forked_ranks
from tests.forked_ranks import run_ranks
from tests.programs import TRAIN, rows, small_run
from tests.selection import matrix, two_ranks
from tests.test_tools_run import problem_rows
from tests.tool_models import make_script_model

STEPS = 2
IN_SLICES = (
    "rollout.group_size=2",
    "rollout.max_new_tokens=96",
    "rollout.slice_tokens=12",
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
)
"""Most completions need several slices."""
IN_FLIGHT = {"carry": "rollout/sequences_in_flight", "defer": "rollout/deferred_groups"}
"""The metric of what a step leaves unfinished."""


def make_mixture(base: Path, folder: Path, stops: bool = False) -> Path:
    """A random mixture of experts with the tokenizer of `base`; `stops` makes it end soon or late."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    words = AutoConfig.from_pretrained(base)
    config = Qwen3MoeConfig(
        vocab_size=words.vocab_size,
        eos_token_id=words.eos_token_id,
        max_position_embeddings=words.max_position_embeddings,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Qwen3MoeForCausalLM(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            if stops:
                model.lm_head.weight[words.eos_token_id] *= 10
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ranks", [1, two_ranks(matrix)])
def test_a_run_in_float32_is_the_same_with_the_experts_of_its_engine(
    arithmetic: Path, tmp_path: Path, ranks: int
) -> None:
    """With one update a step: the policy of a later one would choose other experts."""
    mixture = make_mixture(arithmetic / "base", tmp_path / "mixture")
    by_replay = {}
    for replay in ("none", "engine"):
        output = tmp_path / replay
        settings = (
            f"model.path={mixture}",
            "parallel.tensor=1",
            f"parallel.expert={ranks}",
            f"policy.routing_replay={replay}",
            "algorithm.n_minibatches=1",
            "optimizer.lr=3e-3",
            f"run.total_steps={STEPS}",
            "save.ckpt_freq_secs=null",
        )
        process = run_ranks(ranks, [*TRAIN, *small_run(arithmetic, output), *settings])
        told = "with a mixture of experts" in process.stdout + process.stderr
        assert told == (replay == "none")
        by_replay[replay] = rows(output)
    first = by_replay["engine"][0]
    mean, largest = (first.pop(f"routing/mismatch_without_replay{end}") for end in ("", "_max"))
    assert mean == pytest.approx(first["train/behaviour_logprob_diff"], 1e-4)
    assert largest == first["train/behaviour_logprob_diff_max"] > 0
    for row in by_replay["engine"]:
        shares = [row.pop(f"routing/differing_{name}") for name in ("choices", "tokens")]
        assert shares == [0, 0]
    assert by_replay["engine"] == by_replay["none"]
    assert len(by_replay["none"]) == STEPS


@pytest.mark.parametrize("replay", ["old", pytest.param("engine", marks=matrix)])
def test_routes_are_compared_in_the_first_pass_of_a_step_that_replays_them(
    arithmetic: Path, tmp_path: Path, replay: str
) -> None:
    """The policy chooses alike by the weights that have sampled, in float32.

    Those of a later update would choose other experts here and there."""
    output = tmp_path / "run"
    settings = (
        f"model.path={make_mixture(arithmetic / 'base', tmp_path / 'mixture')}",
        "parallel.tensor=1",
        f"policy.routing_replay={replay}",
        "algorithm.recompute_logprobs=true",
        "optimizer.lr=1e-2",
        f"run.total_steps={STEPS}",
        "save.ckpt_freq_secs=null",
    )
    run_ranks(1, [*TRAIN, *small_run(arithmetic, output), *settings])
    shares = [row["routing/differing_choices"] for row in rows(output)]
    assert len(shares) == STEPS
    if replay == "engine":
        assert shares == [0, 0]
    else:
        assert all(share < 0.5 for share in shares) and shares[-1] > 0


def interrupted_after(step: int, whole: Path, folder: Path) -> None:
    """A run's folder as it was when the run had made so many steps."""
    shutil.copytree(whole, folder)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:step]))
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize("tail", ["carry", pytest.param("defer", marks=matrix)])
def test_completions_in_slices_are_replayed_by_their_own_routes_and_after_a_resume(
    arithmetic: Path, tmp_path: Path, tail: str
) -> None:
    """The policy chooses as all the engines did, in float32 with the weights at rest."""
    steps = 3
    whole = tmp_path / "whole"
    settings = (
        f"model.path={make_mixture(arithmetic / 'base', tmp_path / 'mixture', stops=True)}",
        "parallel.tensor=1",
        "policy.routing_replay=engine",
        "optimizer.lr=1e-30",
        "optimizer.min_lr=0",
        "algorithm.n_minibatches=1",
        f"rollout.tail={tail}",
        f"run.total_steps={steps}",
        "save.ckpt_freq_steps=1",
        f"save.keep_last={steps}",
        "save.ckpt_freq_secs=null",
        *IN_SLICES,
    )
    run_ranks(1, [*TRAIN, *small_run(arithmetic, whole), *settings])
    whole_rows = rows(whole)
    assert [row["routing/differing_choices"] for row in whole_rows] == [0] * steps
    assert whole_rows[1][IN_FLIGHT[tail]] > 0
    saved = list((whole / "checkpoints").glob("step-*/routes-00000.safetensors"))
    assert bool(saved) == (tail == "carry")

    resumed = tmp_path / "resumed"
    interrupted_after(2, whole, resumed)
    run_ranks(1, [*TRAIN, *small_run(arithmetic, resumed), *settings])
    assert rows(resumed) == whole_rows


@pytest.mark.parametrize("ranks", [1, two_ranks(matrix)])
def test_a_captured_update_replays_the_engines_experts_to_the_bit(
    arithmetic: Path, tmp_path: Path, ranks: int
) -> None:
    """Completions have routes of several slices, and weights of later updates other choices."""
    output = tmp_path / "run"
    settings = (
        f"model.path={make_mixture(arithmetic / 'base', tmp_path / 'mixture', stops=True)}",
        "parallel.tensor=1",
        f"parallel.expert={ranks}",
        "policy.routing_replay=engine",
        "algorithm.n_minibatches=2",
        "optimizer.lr=1e-2",
        "rollout.tail=carry",
        f"run.total_steps={STEPS}",
        f"telemetry.capture_steps=[{STEPS}]",
        "save.ckpt_freq_secs=null",
        *IN_SLICES,
    )
    run_ranks(ranks, [*TRAIN, *small_run(arithmetic, output), *settings])
    assert forked_ranks.replay(ranks, output)[0]["bit_equal"]
    capture = output / "captures" / f"step-{STEPS:06d}"
    routes = capture / "routes-00000.safetensors"
    assert len(list(capture.glob("routes-*"))) == ranks
    routes.write_bytes(routes.read_bytes()[:-1])
    _, console = forked_ranks.replay(ranks, output, expect=MISTAKE)
    assert "routes-00000.safetensors is not as it was written" in console
    routes.unlink()
    comparison, _ = forked_ranks.replay(ranks, output, "policy.routing_replay=none", expect=FAILURE)
    assert comparison["start"] == "equal" and comparison["weights"] == "other"


@pytest.mark.parametrize("tail", ["carry", pytest.param("wait", marks=matrix)])
def test_completions_that_call_tools_replay_their_own_routes_and_after_a_resume(
    tmp_path: Path, tail: str
) -> None:
    """The policy chooses as all the engines did, in float32 with the weights at rest.

    Outputs of tools stand in most completions, and some are carried with them."""
    make_script_model(tmp_path / "base", experts=8)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(problem_rows(10, 30))
    steps = 3
    whole = tmp_path / "whole"
    settings = (
        "parallel.tensor=1",
        "policy.routing_replay=engine",
        "optimizer.lr=1e-30",
        "optimizer.min_lr=0",
        "algorithm.n_minibatches=1",
        "data.prompts_per_step=3",
        "data.template=raw",
        "tools.format=fence",
        "tools.max_calls=3",
        "tools.max_output_tokens=64",
        "tools.cores=1",
        "tools.sessions=2",
        f"rollout.tail={tail}",
        f"run.total_steps={steps}",
        "save.ckpt_freq_steps=1",
        f"save.keep_last={steps}",
        "save.ckpt_freq_secs=null",
        *IN_SLICES,
        "rollout.group_size=4",
    )
    run_ranks(1, [*TRAIN, *small_run(tmp_path, whole), *settings])
    whole_rows = rows(whole)
    assert [row["routing/differing_choices"] for row in whole_rows] == [0] * steps
    assert all(row["tools/given_tokens"] > 0 for row in whole_rows)
    if tail == "carry":
        assert whole_rows[1][IN_FLIGHT[tail]] > 0
        checkpoint = whole / "checkpoints" / "step-000002"
        assert list(checkpoint.glob("routes-*.safetensors"))
        content = (checkpoint / UNFINISHED).read_bytes()
        flight = read_unfinished(content, 4, vocab_size=2**20, text_of=lambda ids, stopped: "")
        parts = [part for group in flight.groups for part in group.parts]
        carried = [part for part in parts if isinstance(part, PartialCompletion)]
        assert any(call.output for part in carried for call in part.calls)

    resumed = tmp_path / "resumed"
    interrupted_after(2, whole, resumed)
    run_ranks(1, [*TRAIN, *small_run(tmp_path, resumed), *settings])
    assert rows(resumed) == whole_rows
