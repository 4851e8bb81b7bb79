"""rlmath/cli/plan_memory.py: a config and a model's shape make a table, plain data or a refusal."""

import json
from pathlib import Path

import pytest

from rlmath.cli.plan_memory import main
from rlmath.config.schema import ParallelConfig, RolloutConfig
from rlmath.planning.parallelism import least_ranks

STAGED = Path(__file__).resolve().parents[2] / "configs" / "areal" / "v0.1_1.5b_stages.yaml"
MODEL = "model.path=/nowhere/Qwen2.5-7B"
"""Planned with the published shape."""
FITS = """
parallel.tensor=4 parallel.sequence=true policy.recompute_granularity=full policy.recompute_method=uniform
policy.recompute_num_layers=1 memory.offload_optimizer=true memory.gpu=H100-80GB
""".split()


def test_a_table_of_parts_by_phases_for_every_stage(capsys: pytest.CaptureFixture[str]):
    assert main([MODEL, *FITS, "parallel.pipeline=2", "--ranks", "16"]) == 0
    out = capsys.readouterr().out
    assert "7.62 B parameters on 16 ranks\nLayout: TP4 x PP2 x DP2, 16 engines of TP1\n" in out
    assert "H100-80GB: 79.1 GiB, of which a run may fill 72.9" in out
    assert "Ranks of pipeline stage 0, from rank 0 on:" in out
    assert "Ranks of pipeline stage 1, from rank 8 on:" in out
    assert out.count("kv_cache") == out.count("  update: ") == 2


def test_plain_data_adds_up(capsys: pytest.CaptureFixture[str]):
    assert main([MODEL, *FITS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 4 and report["problems"] == []
    (plan,) = report["plans"]
    assert plan["held"] == {phase: sum(parts.values()) for phase, parts in plan["phases"].items()}
    assert plan["held"][plan["worst"]] == max(plan["held"].values())
    assert report["device"]["kind"] == "cuda"


def test_what_cannot_fit_ends_with_an_error_and_the_key(capsys: pytest.CaptureFixture[str]):
    assert main([MODEL, "memory.gpu=A100-40GB"]) == 2
    streams = capsys.readouterr()
    assert "  update: " in streams.out
    assert (
        'in the phase "update"' in streams.err
        and "policy.recompute_granularity=full" in streams.err
    )


def test_settings_that_no_run_could_have_are_told_and_not_planned(
    capsys: pytest.CaptureFixture[str],
):
    assert main([MODEL, "parallel.tensor=3", "memory.gpu=H10", "--ranks", "4"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert '"H100-80GB"' in streams.err and "does not divide the 4 ranks" in streams.err


def test_without_a_gpu_the_plan_is_for_the_cpu(capsys: pytest.CaptureFixture[str]):
    assert main([MODEL, "run.device=cpu"]) == 0
    assert "Planned for the CPU" in capsys.readouterr().out


def test_the_longest_stage_is_planned_and_its_keys_are_named(capsys: pytest.CaptureFixture[str]):
    assert main(["--config", str(STAGED), "memory.gpu=null", "memory.gpu_gib=20"]) == 2
    stderr = capsys.readouterr().err
    assert (
        "Lower policy.max_tokens_per_microbatch (now 27072, at least the longest sequence, 26048)"
        in stderr
    )
    assert "(The largest lengths of stages.* count.)" in stderr


def test_the_least_ranks_make_whole_replicas_and_whole_engines():
    parallel = ParallelConfig(tensor=2, pipeline=3)
    assert least_ranks(parallel, RolloutConfig(tensor_parallel=4)) == 12


def test_engines_on_ranks_of_their_own_have_a_table(capsys: pytest.CaptureFixture[str]):
    words = (
        MODEL,
        *FITS,
        "rollout.ranks=4",
        "rollout.tensor_parallel=2",
        "rollout.max_staleness=0",
    )
    assert main([*words, "--ranks", "12"]) == 0
    out = capsys.readouterr().out
    assert (
        "TP4 x PP1 x DP2, 2 engines of TP2 on ranks of their own\nranks 0-7 train, ranks 8-11"
        in out
    )
    assert (
        "Ranks of pipeline stage 0, from rank 0 on:" in out
        and "Ranks of engines, from rank 8 on:" in out
    )
    assert (out.count("kv_cache"), out.count("  update: ")) == (1, 1)
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 8 and [plan["is_engine"] for plan in report["plans"]] == [False, True]
    assert report["plans"][1]["rank"] == 4
    assert main([*words, "rollout.memory_share=0.97"]) == 2
    assert "memory: engine rank 4 needs" in capsys.readouterr().err
