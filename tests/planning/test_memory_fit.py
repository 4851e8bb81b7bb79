"""What is refused because it cannot fit a GPU, and the advice that goes with it."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.config.length_curriculum import checked_length_stages
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    ToolsConfig,
)
from rlmath.planning import memory_fit
from rlmath.planning.checks import check_config, setting_problems
from rlmath.planning.memory_estimate import largest, mesh_of
from rlmath.planning.memory_fit import (
    measured_line,
    usable_bytes,
)
from tests.planning.of_policy import lines_at_start, problems_of_fit, rank_plans, target_of
from tests.planning.test_memory_estimate import CPU, GIB, H100, ONE_LAYER, QWEN_7B, config


def fitting() -> Config:
    """8 ranks of TP4 with a long budget on H100: recomputed, it fits."""
    return config(
        parallel=ParallelConfig(tensor=4, sequence=True),
        policy=PolicyConfig(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
        memory=MemoryConfig(gpu="H100-80GB", offload_optimizer=True),
    )


def test_what_fits_is_not_refused():
    assert problems_of_fit(fitting(), QWEN_7B, 8) == []


def test_on_cpu_nothing_is_refused_without_a_named_gpu():
    assert target_of(config()) == CPU
    assert problems_of_fit(config(), QWEN_7B, 1) == []
    assert problems_of_fit(config(memory=MemoryConfig(gpu_gib=1.0)), QWEN_7B, 1)


class Nvml(types.ModuleType):
    """NVIDIA's library on a machine with two GPUs, of 40 and 80 GiB."""

    class NVMLError(Exception):
        pass

    sizes = (40, 80)
    uuids = ("GPU-a", "GPU-b")

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise self.NVMLError("Not Found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(total=self.sizes[handle] * GIB)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with GPUs, as far as torch and NVML tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("pynvml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


AUTO = RunConfig(device="auto")


@pytest.mark.parametrize(
    ("visible", "gib"), [(None, 40), ("0,1", 40), ("1", 80), ("GPU-b,GPU-a", 80), ("", 40)]
)
def test_the_gpu_that_is_there_is_the_first_visible_one(
    on_gpu: pytest.MonkeyPatch, visible: str | None, gib: int
):
    if visible is not None:
        on_gpu.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert target_of(config(run=AUTO)).total_bytes == gib * GIB


@pytest.mark.parametrize(
    ("memory", "gib", "name"),
    [
        (MemoryConfig(gpu="H100-80GB"), 40, "the GPU that is there"),
        (MemoryConfig(gpu_gib=60.0), 40, "the GPU that is there"),
        (MemoryConfig(gpu_gib=30.0), 30, "the GPU"),
    ],
)
def test_of_the_gpu_named_and_the_one_that_is_there_the_smaller_is_planned_for(
    on_gpu: pytest.MonkeyPatch, memory: MemoryConfig, gib: int, name: str
):
    target = target_of(config(run=AUTO, memory=memory))
    assert (target.total_bytes, target.name) == (gib * GIB, name)
    # A run on CPU does not use the GPU: it is planned for another machine.
    elsewhere = target_of(config(memory=MemoryConfig(gpu="H100-80GB")))
    assert elsewhere == H100


def test_a_gpu_whose_memory_cannot_be_read_must_be_named(on_gpu: pytest.MonkeyPatch):
    on_gpu.setenv("CUDA_VISIBLE_DEVICES", "GPU-c")
    with pytest.raises(
        ValueError, match=r'by NVML, with "GPU-c" first in CUDA_VISIBLE_DEVICES: Not Found'
    ):
        target_of(config(run=AUTO))
    on_gpu.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match=r"package nvidia-ml-py\. Name it by memory.gpu"):
        target_of(config(run=AUTO))
    target = target_of(config(run=AUTO, memory=MemoryConfig(gpu_gib=30.0)))
    assert target.total_bytes == 30 * GIB


def test_the_figures_and_the_key_of_the_largest_part_are_told():
    settings = fitting()
    # 18,944 x 3 / 4 and more elements of 65,536 tokens in 28 layers: far above 80 GiB without
    # recomputation.
    settings = replace(settings, policy=PolicyConfig(max_tokens_per_microbatch=65536))
    (problem,) = problems_of_fit(settings, QWEN_7B, 8)
    assert 'phase "update"' in problem and "H100-80GB has 79.10 GiB" in problem
    assert "(activations 71.53," in problem
    assert "policy.recompute_granularity=full" in problem


def test_what_torch_counted_is_told_beside_the_plan_without_the_engine_that_sleeps():
    """A run of SmolLM2-135M on an H200, of which 82.5 GiB were measured.

    The measurement is of 2026-11-27, with more activations in it."""
    smol = replace(
        QWEN_7B,
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        vocab_size=49152,
        tied_embeddings=True,
        max_positions=8192,
    )
    settings = config(
        memory=MemoryConfig(gpu_gib=143771 / 1024),
        policy=PolicyConfig(16384, transformer_impl="local"),
        rollout=RolloutConfig(memory_share=0.5, max_num_seqs=512),
    )
    assert "generate: 71.95 GiB" in "".join(lines_at_start(settings, smol, 1))
    update = rank_plans(settings, smol, 1, target_of(settings))[0].held("update") / GIB
    assert 68.63 + update == pytest.approx(82.5, rel=0.03)
    measured = measured_line(
        settings,
        read_run_shapes(settings, smol),
        mesh_of(settings.parallel, settings.rollout, 1, rank=0),
        "grpo",
        int(82.5 * GIB),
        int(68.6 * GIB),
        int(13.25 * GIB),
    )
    assert measured == (
        "GPU memory of rank 0 until the end of its first step: beside the engine's weights and KV "
        "cache (68.60 GiB, "
        f"planned 68.63) torch held 13.90 GiB at most, planned {update:.2f} (update); now, with "
        "the engine asleep if "
        "there is one, the driver counts 13.25 GiB"
    )
    apart = replace(settings, rollout=replace(settings.rollout, ranks=1))
    line = measured_line(
        apart,
        read_run_shapes(apart, smol),
        mesh_of(apart.parallel, apart.rollout, 2, rank=0),
        "grpo",
        int(13 * GIB),
        0,
        int(13.25 * GIB),
    )
    assert (
        f"first step: torch held 13.00 GiB at most, planned {update - 1:.2f} (update); now" in line
    )


def with_setting(settings: Config, key: str, value: object) -> Config:
    section, name = key.split(".")
    return replace(settings, **{section: replace(getattr(settings, section), **{name: value})})


def advice(problem: str) -> list[str]:
    """The sentences that say what to change."""
    return re.findall(r"(?:Set|Lower|Raise|Start) [a-z].*?\.(?= [A-Z]|$)", problem)


def taken(settings: Config, sentence: str) -> tuple[Config, int]:
    """The settings after the advice, and how many times as many ranks they take.

    Of "this or that" it is this; what is raised is doubled, and what is lowered becomes the least
    that is told, or nine tenths."""
    for key, value in re.findall(r"([a-z_]+\.[a-z_]+)=([a-z0-9]+)", sentence):
        settings = with_setting(settings, key, yaml.safe_load(value))
    if share := re.search(r"rollout.memory_share to ([0-9.]*[0-9])", sentence):
        settings = with_setting(settings, "rollout.memory_share", float(share[1]))
    if sentence.startswith("Start"):
        return settings, 2
    for verb, key in re.findall(r"(?<!or )\b([Rr]aise|[Ll]ower) ([a-z_]+\.[a-z_]+)", sentence):
        value = getattr(getattr(settings, key.split(".")[0]), key.split(".")[1])
        if verb in ("Raise", "raise"):
            settings = with_setting(settings, key, 2 * value)
            continue
        least = re.search(r"at least (?:the longest sequence, )?([0-9.]*[0-9])", sentence)
        lowered = float(least[1]) if least else 0.9 * (value or 16384)
        settings = with_setting(
            settings, key, lowered if isinstance(value, float) else int(lowered)
        )
    return settings, 2 if "Raise parallel." in sentence or "Raise rollout.tensor" in sentence else 1


def smaller_after(settings: Config, ranks: int, problem: str) -> list[str]:
    """The advice of a problem, after it was checked.

    Each part of it was followed and found to make the phase smaller."""
    match = re.search(r'pipeline stage (\d+)\) .* in the phase "(\w+)"', problem)
    assert match is not None
    stage = int(match[1])
    phase = match[2]
    target = target_of(settings)
    before = rank_plans(settings, QWEN_7B, ranks, target)[stage].held(phase)
    for sentence in advice(problem):
        changed, times = taken(settings, sentence)
        after = rank_plans(changed, QWEN_7B, times * ranks, target)[stage].held(phase)
        assert after < before, f"{sentence} {problem}"
    return advice(problem)


@pytest.mark.parametrize("gpu_gib", [4.0, 16.0, 24.0, 40.0, 60.0])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_no_advice_is_in_vain(gpu_gib: float, offload: bool, share: float):
    """Whatever is refused, each part of its advice makes the phase smaller."""
    memory = MemoryConfig(offload, offload, offload, offload, gpu_gib=gpu_gib)
    for layout in (
        ParallelConfig(),
        ParallelConfig(tensor=4),
        ParallelConfig(tensor=2, sequence=True, pipeline=2),
    ):
        for policy in (PolicyConfig(), PolicyConfig(32768), fitting().policy):
            settings = config(
                memory=memory,
                parallel=layout,
                policy=policy,
                rollout=RolloutConfig(memory_share=share),
                optimizer=OptimizerConfig(distributed=offload),
                algorithm=AlgorithmConfig(kl_coef=0.1),
            )
            ranks = layout.tensor * layout.pipeline
            for problem in problems_of_fit(settings, QWEN_7B, ranks):
                if "in the phase" in problem:
                    assert smaller_after(settings, ranks, problem), problem


def test_an_engine_without_room_for_one_sequence_is_refused():
    settings = replace(fitting(), rollout=RolloutConfig(memory_share=0.2))
    (problem,) = problems_of_fit(settings, QWEN_7B, 8)
    # 15.8 GiB for 14.2 of weights and a workspace: 17,408 tokens of 14 KiB and more do not fit.
    assert problem.startswith("rollout.memory_share is 0.2, 15.82 GiB of the 79.10")
    raised = replace(settings, rollout=RolloutConfig(memory_share=0.26))
    assert problems_of_fit(raised, QWEN_7B, 8) == []


def test_a_kv_cache_of_a_given_size_is_planned_and_must_hold_one_sequence():
    settings = with_setting(fitting(), "rollout.kv_cache_gib", 1.0)
    assert problems_of_fit(settings, QWEN_7B, 8) == []
    plan, _ = largest(rank_plans(settings, QWEN_7B, 8, target_of(settings)))
    assert plan.part("kv_cache") == GIB // (16 * 56 * 1024) * 16 * 56 * 1024
    (problem,) = problems_of_fit(with_setting(settings, "rollout.kv_cache_gib", 0.9), QWEN_7B, 8)
    assert problem.startswith("rollout.kv_cache_gib is 0.9; one sequence of 17408 tokens")
    problem = problems_of_fit(with_setting(settings, "rollout.kv_cache_gib", 60.0), QWEN_7B, 8)[0]
    assert '"generate"' in problem and "Lower rollout.kv_cache_gib (now 60)." in problem


@pytest.mark.parametrize(
    ("max_calls", "max_output_tokens", "longest"),
    [(2, 100, 17640), (3, 100, 17756), (2, 400, 18240)],
)
def test_cache_and_micro_batches_hold_what_tools_give(
    max_calls: int, max_output_tokens: int, longest: int
):
    """Prompt and completion have 17,408 tokens, an output 16 around it."""
    tools = ToolsConfig(format="fence", max_calls=max_calls, max_output_tokens=max_output_tokens)
    settings = replace(fitting(), tools=tools)
    blocks = -(-longest // 16) + 1
    cache_gib = blocks * 16 * 56 * 1024 / GIB
    assert (
        problems_of_fit(with_setting(settings, "rollout.kv_cache_gib", cache_gib), QWEN_7B, 8) == []
    )
    smaller = with_setting(settings, "rollout.kv_cache_gib", (blocks - 1) / blocks * cache_gib)
    (problem,) = problems_of_fit(smaller, QWEN_7B, 8)
    assert f"one sequence of {longest} tokens" in problem

    def activations(tokens: int) -> int:
        fitted = with_setting(settings, "policy.max_tokens_per_microbatch", tokens)
        plans = rank_plans(fitted, QWEN_7B, 8, target_of(fitted))
        return largest(plans)[0].phases["update"]["activations"]

    short = with_setting(settings, "policy.max_tokens_per_microbatch", longest - 1)
    (problem,) = setting_problems(short, checked_length_stages(short), 8)
    assert f" = {longest} tokens and must fit" in problem
    assert activations(longest) * 17408 == activations(17408) * longest


def test_the_share_that_an_engine_needs_is_told_beside_what_the_gpu_has():
    """Qwen2.5-72B has 135.4 GiB of weights: 1.7 times an H100.

    On 4 ranks they take half of an H100 with what comes beside."""
    large = replace(
        QWEN_7B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, ffn_size=29568
    )
    problem = problems_of_fit(fitting(), large, 4)[0]
    assert (
        "a share of 1.85, and 0.92 is the largest. Raise it, or raise rollout.tensor_parallel "
        "(now 1)" in problem
    )
    taken_up = with_setting(fitting(), "rollout.tensor_parallel", 4)
    refused = with_setting(taken_up, "rollout.memory_share", 0.48)
    assert "a share of 0.49, and 0.92 is the largest" in problems_of_fit(refused, large, 4)[0]
    enough = problems_of_fit(with_setting(taken_up, "rollout.memory_share", 0.49), large, 4)
    assert not any(problem.startswith("rollout.memory_share") for problem in enough)


@pytest.mark.parametrize("gpu_gib", [1.0, 2.0])
def test_a_gpu_smaller_than_the_reserve_is_told_as_such(gpu_gib: float):
    (problem,) = problems_of_fit(config(memory=MemoryConfig(gpu_gib=gpu_gib)), ONE_LAYER, 1)
    assert problem.startswith(
        f"memory: the GPU has {gpu_gib:.2f} GiB, no more than the 3 GiB and 4% that stay"
    )


def test_a_gpu_is_named_by_one_key():
    (problem,) = problems_of_fit(
        config(memory=MemoryConfig(gpu="H100-80GB", gpu_gib=3.0)), QWEN_7B, 1
    )
    assert problem.startswith('memory.gpu is "H100-80GB" and memory.gpu_gib is 3; give one')


def test_a_run_that_cannot_fit_is_refused_before_it_starts(untied_model: Path, tmp_path: Path):
    train_file = tmp_path / "train.jsonl"
    train_file.write_text("{}\n", encoding="utf-8")
    settings = Config(
        run=RunConfig(output_dir=str(tmp_path / "run"), device="cpu"),
        model=ModelConfig(path=str(untied_model)),
        data=DataConfig(train_path=str(train_file), max_prompt_tokens=32),
        rollout=RolloutConfig(max_new_tokens=64),
        memory=MemoryConfig(gpu_gib=2.5),
    )
    with pytest.raises(ValueError, match="the GPU has 2"):
        check_config(settings, world_size=1)
    assert (
        check_config(
            replace(settings, memory=MemoryConfig(gpu_gib=16.0)), world_size=1
        ).policy.num_layers
        == 4
    )


def test_the_start_tells_every_phase_of_the_largest_rank():
    settings = replace(fitting(), parallel=ParallelConfig(tensor=4, sequence=True, pipeline=2))
    head, *lines = lines_at_start(settings, QWEN_7B, 8)
    plans = rank_plans(settings, QWEN_7B, 8, target_of(settings))
    plan, phase = largest(plans)
    assert f"rank {plan.rank} (pipeline stage {plan.stage}) on H100-80GB" in head
    assert [line.split(":")[0].strip() for line in lines] == list(plan.phases)
    worst_line = lines[list(plan.phases).index(phase)]
    assert f"{plan.held(phase) / GIB:.2f} GiB" in worst_line
    # 4% and 3 GiB of 79.1 stay free.
    assert usable_bytes(H100) == pytest.approx((79.1 * 0.96 - 3) * GIB, rel=1e-6)


def test_on_cpu_ranks_that_are_more_than_the_machine_holds_are_told_of(
    monkeypatch: pytest.MonkeyPatch,
):
    settings = replace(fitting(), memory=MemoryConfig(), run=RunConfig(device="cpu"))
    plan, _ = largest(rank_plans(settings, QWEN_7B, 8, target_of(settings)))
    needed = 8 * plan.held(plan.worst) + int(8 * 0.6 * GIB)
    for machine_bytes, warns in ((needed - 1, True), (needed, False)):
        monkeypatch.setattr(
            memory_fit, "total_bytes", lambda machine_bytes=machine_bytes: machine_bytes
        )
        assert ("for 8 ranks" in lines_at_start(settings, QWEN_7B, 8)[-1]) == warns


# ---------------------------------------------------------------- engines on ranks of their own


def own_ranks(ranks: int, engine: int = 4, **rollout: object) -> Config:
    """`fitting` with engines on ranks of their own."""
    return replace(fitting(), rollout=RolloutConfig(ranks=ranks, tensor_parallel=engine, **rollout))  # type: ignore[arg-type]


def test_both_kinds_of_ranks_are_told_at_the_start():
    lines = lines_at_start(own_ranks(4), QWEN_7B, 12)
    assert [line for line in lines if not line.startswith(" ")] == [
        "Planned memory of rank 0 (pipeline stage 0) on H100-80GB, may fill 72.94 GiB:",
        "Planned memory of engine rank 8 on H100-80GB, may fill 72.94 GiB:",
    ]
    phases = [line.split(":")[0].strip() for line in lines if line.startswith(" ")]
    assert phases == ["logprobs", "update", "generate"]
    assert "kv_cache" in lines[4] and "kv_cache" not in lines[1] + lines[2]


def test_what_fits_on_ranks_of_either_kind_is_not_refused():
    assert problems_of_fit(own_ranks(4), QWEN_7B, 12) == []


def test_an_engine_rank_that_would_take_too_much_is_named():
    (problem,) = problems_of_fit(own_ranks(4, memory_share=0.97), QWEN_7B, 12)
    assert problem.startswith("memory: engine rank 8 needs 76.73 GiB (kv_cache ")
    assert (
        'in the phase "generate"' in problem and "Lower rollout.memory_share (now 0.97" in problem
    )
    assert "offload" not in problem and "parallel." not in problem


def test_a_training_rank_that_holds_too_much_is_advised_of_what_helps_it_alone():
    settings = replace(own_ranks(4), policy=PolicyConfig(max_tokens_per_microbatch=65536))
    (problem,) = problems_of_fit(settings, QWEN_7B, 12)
    assert "rank 0 (pipeline stage 0) needs" in problem and 'phase "update"' in problem
    assert "policy.recompute_granularity=full" in problem
    assert "rollout." not in problem and "offload" not in problem
    # a model that tensor parallelism cannot split: twice as many ranks that train, which leaves the
    # engine its own
    one_head = replace(QWEN_7B, num_kv_heads=1)
    undivided = ParallelConfig()
    policy = replace(fitting().policy, max_tokens_per_microbatch=17408)
    small = replace(
        own_ranks(1, engine=1), memory=MemoryConfig(gpu_gib=60.0), parallel=undivided, policy=policy
    )
    (problem,) = [
        message for message in problems_of_fit(small, one_head, 2) if 'phase "update"' in message
    ]
    assert "Start more ranks that train, which share the optimizer." in problem
    assert "Raise parallel.tensor (now 1) or parallel.pipeline (now 1)." in problem
