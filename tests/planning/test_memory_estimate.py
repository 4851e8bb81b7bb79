"""The memory plan in numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmath.checkpoint.hf.config_json import required_shape
from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.model_shape import LinearScaling
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
)
from rlmath.planning.memory_estimate import (
    Target,
    buffer_elements,
    engine_mesh_of,
    mesh_of,
    plan_engine_ranks,
)
from rlmath.planning.memory_formulas import (
    StageWork,
    backward_bytes,
    engine_bytes,
    in_flight,
    kv_bytes_per_token,
    layer_elements,
    longest_sequence_bytes,
    weight_bytes,
)
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes
from tests.planning.of_policy import rank_plans

GIB = 2**30
H100 = Target("cuda", "H100-80GB", int(79.1 * GIB), local_layers=False)
CPU = Target("cpu", "CPU", None, local_layers=True)
QWEN_7B = replace(required_shape("/nowhere/Qwen2.5-7B")[0], max_positions=32768)
QWEN_30B_A3B, _ = required_shape("/nowhere/Qwen3-30B-A3B")
PARAMETERS = 7_615_616_512
"""Parameters, as Qwen's model card counts Qwen2.5-7B."""
ONE_LAYER = replace(
    QWEN_7B,
    num_layers=1,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=256,
    vocab_size=128,
    max_positions=1024,
)


def work(**changed: object) -> StageWork:
    """One stage of one layer in bfloat16 on GPU, 10 tokens a micro-batch."""
    plain = StageWork(1, 1, True, True, False, 10, 1, False, 2, 2, "cuda", local_layers=False)
    return replace(plain, **changed)  # type: ignore[arg-type]


def config(**sections: object) -> Config:
    return replace(Config(run=RunConfig(device="cpu")), **sections)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what outlives a pass


def test_mixed_precision_adam_takes_18_bytes_a_parameter():
    # bfloat16 parameters 2, float32 gradients 4, main parameters and two moments 4 each.
    (plan,) = rank_plans(config(optimizer=OptimizerConfig(distributed=False)), QWEN_7B, 1, H100)
    assert parameter_count(QWEN_7B) == PARAMETERS
    assert plan.part("parameters") == 2 * PARAMETERS
    assert plan.part("gradients") == 4 * PARAMETERS
    assert plan.part("optimizer") == 12 * PARAMETERS


def test_experts_are_shared_by_expert_parallel_ranks_and_their_optimizer_by_those_that_have_the_same():
    # Three matrices of 768 x 2048 in each of 128 experts of 48 layers: 28,991,029,248 of 30.5 B
    # parameters.
    experts = 128 * 48 * 3 * 768 * 2048
    assert parameter_count(QWEN_30B_A3B) == 30_532_122_624
    other_parameters = 30_532_122_624 - experts
    plain = OptimizerConfig(distributed=False)
    (plan,) = rank_plans(
        config(parallel=ParallelConfig(expert=8), optimizer=plain), QWEN_30B_A3B, 16, H100
    )
    assert plan.part("parameters") == 2 * (other_parameters + experts // 8)
    assert plan.part("gradients") == 4 * (other_parameters + experts // 8)
    # 16 ranks share what all have, 2 the experts that they have both; every size is a multiple of
    # 128.
    (plan,) = rank_plans(config(parallel=ParallelConfig(expert=8)), QWEN_30B_A3B, 16, H100)
    assert plan.part("optimizer") == pytest.approx(
        12 * (other_parameters / 16 + experts / 8 / 2), rel=1e-6
    )


def test_logits_in_float32_take_twice_as_much_as_those_of_a_policy_of_16_bits():
    plain, float16, head = (
        rank_plans(
            config(policy=PolicyConfig(dtype=dtype, head_dtype=head)),
            QWEN_7B,
            1,
            replace(H100, dtype=dtype),
        )[0]
        for dtype, head in (("auto", None), ("float16", None), ("float16", "float32"))
    )
    assert plain.phases == float16.phases
    assert head.part("logits") == 2 * plain.part("logits")
    assert head.part("parameters") == plain.part("parameters")
    # The output layer's product is no longer added to its buffer by itself: it has a gradient of
    # 152,064 x 3584.
    assert plain.part("dummy_gradients") - head.part("dummy_gradients") == 2 * 152_064 * 3584
    both = PolicyConfig(dtype="float32", head_dtype="float32")
    of_float32 = [
        rank_plans(config(policy=policy), QWEN_7B, 1, CPU)[0].phases
        for policy in (both, PolicyConfig())
    ]
    assert of_float32[0] == of_float32[1]


def test_sgd_has_no_moments():
    sgd = config(optimizer=OptimizerConfig(kind="sgd", distributed=False))
    assert rank_plans(sgd, QWEN_7B, 1, CPU)[0].part("optimizer") == 0
    assert rank_plans(sgd, QWEN_7B, 1, H100)[0].part("optimizer") == 4 * PARAMETERS


def test_the_distributed_optimizer_is_shared_over_data_parallel_ranks():
    single, four = (rank_plans(config(), QWEN_7B, ranks, H100)[0] for ranks in (1, 4))
    assert four.part("optimizer") == pytest.approx(single.part("optimizer") / 4, rel=1e-6)
    assert four.part("gradients") == pytest.approx(single.part("gradients"), rel=1e-6)


def test_the_distributed_optimizers_buffer_is_padded():
    # 100 elements, the next parameter starts at 128 and ends at 129; a multiple of 128 and of 3
    # ranks is 384.
    assert buffer_elements([100, 1], True, 3) == 384
    assert buffer_elements([100, 1], False, 3) == 101


def test_stages_differ_and_a_tied_head_is_a_copy_of_the_embedding():
    tied = replace(QWEN_7B, tied_embeddings=True)
    plain = OptimizerConfig(distributed=False)
    parallel = ParallelConfig(pipeline=2, first_stage_layers=12)
    first, last = rank_plans(config(optimizer=plain, parallel=parallel), tied, 4, H100)
    assert (first.rank, last.rank) == (0, 2)
    embedding = 152064 * 3584
    layer = (PARAMETERS - 2 * embedding - 3584) // 28
    assert first.part("parameters") == 2 * (embedding + 12 * layer)
    assert last.part("parameters") == 2 * (embedding + 16 * layer + 3584)


# ---------------------------------------------------------------- phases


def test_what_is_offloaded_leaves_while_the_engine_generates():
    memory = MemoryConfig(offload_optimizer=True, offload_parameters=True, offload_reference=True)
    settings = config(memory=memory, algorithm=AlgorithmConfig(kl_coef=0.1))
    (plan,) = rank_plans(settings, QWEN_7B, 1, H100)
    assert list(plan.phases) == ["sync", "generate", "logprobs", "reference", "update"]
    assert set(plan.phases["sync"]) == {
        "parameters",
        "dummy_gradients",
        "engine_weights",
        "engine_workspace",
    }
    awake = {"dummy_gradients", "engine_weights", "engine_workspace", "kv_cache"}
    assert set(plan.phases["generate"]) == awake
    assert {"parameters", "gradients", "optimizer"} < set(plan.phases["update"])
    assert [phase for phase, parts in plan.phases.items() if "reference" in parts] == ["reference"]


def test_what_is_not_offloaded_stays():
    memory = MemoryConfig(offload_gradients=False)
    settings = config(memory=memory, algorithm=AlgorithmConfig(kl_coef=0.1))
    (plan,) = rank_plans(settings, QWEN_7B, 1, H100)
    for parts in plan.phases.values():
        assert {"parameters", "gradients", "optimizer", "reference"} < set(parts)
    assert plan.worst == "update"
    assert plan.held("update") == sum(plan.phases["update"].values())


def test_on_cpu_only_gradients_leave():
    """What is offloaded is held as host copies, in the same memory."""
    memory = MemoryConfig(offload_optimizer=True, offload_parameters=True, offload_reference=True)
    settings = config(memory=memory, algorithm=AlgorithmConfig(kl_coef=0.1))
    (plan,) = rank_plans(settings, QWEN_7B, 1, CPU)
    for phase, parts in plan.phases.items():
        assert {"parameters", "optimizer", "reference"} < set(parts)
        assert ("gradients" in parts) == (phase not in ("sync", "generate"))


def test_a_whole_policy_needs_no_buffers_for_the_sync():
    (whole,) = rank_plans(config(), QWEN_7B, 2, H100)
    (sharded,) = rank_plans(config(parallel=ParallelConfig(tensor=2)), QWEN_7B, 2, H100)
    assert whole.part("sync_buffers") == 0
    assert sharded.part("sync_buffers") == 4 * 64 * 2**20
    (shared,) = rank_plans(config(parallel=ParallelConfig(tensor=2)), QWEN_7B, 2, CPU)
    assert shared.part("sync_buffers") == 2 * 16 * 2**20


@pytest.mark.parametrize(
    ("settings_mib", "kind", "ranks", "mib"),
    [(64, "cpu", 2, 16), (4, "cpu", 2, 4), (64, "cpu", 1, 64), (64, "cuda", 2, 64)],
)
def test_buckets_are_smaller_where_ranks_share_memory(
    settings_mib: int, kind: str, ranks: int, mib: int
):
    assert bucket_bytes(settings_mib, kind, ranks) == mib * 2**20


def test_empty_gradients_are_kept_one_for_each_shape():
    """Empty gradients are of the matrices of one layer, and of the head."""
    (plan,) = rank_plans(config(), QWEN_7B, 1, H100)
    layer = 3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 18944 * 3584
    assert plan.phases["update"]["dummy_gradients"] == 2 * (layer + 152064 * 3584)
    assert "dummy_gradients" not in rank_plans(config(), QWEN_7B, 1, CPU)[0].phases["update"]


# ---------------------------------------------------------------- engines on ranks of their own

MIB = 2**20


def own_ranks(ranks: int, engine: int = 1, **sections: object) -> Config:
    return config(rollout=RolloutConfig(ranks=ranks, tensor_parallel=engine), **sections)


def test_a_training_rank_beside_engines_of_their_own_has_training_alone():
    plain = OptimizerConfig(distributed=False)
    memory = MemoryConfig(offload_optimizer=True, offload_parameters=True)
    (plan,) = rank_plans(own_ranks(2, optimizer=plain, memory=memory), QWEN_7B, 3, H100)
    assert list(plan.phases) == ["logprobs", "update"] and plan.name == "rank 0 (pipeline stage 0)"
    (colocated,) = rank_plans(
        config(optimizer=plain, rollout=RolloutConfig(cuda_graphs=False)), QWEN_7B, 1, H100
    )
    # what training alone holds, nothing is offloaded
    assert plan.phases == {phase: colocated.phases[phase] for phase in plan.phases}


def test_the_ranks_that_the_engines_leave_share_the_model_and_the_optimizer():
    # 6 ranks, 2 of them an engine's: tensor 2 leaves 2 replicas, that share 3 x 4 bytes a
    # parameter.
    (plan,) = rank_plans(own_ranks(2, 2, parallel=ParallelConfig(tensor=2)), QWEN_7B, 6, H100)
    (four_rank_plan,) = rank_plans(config(parallel=ParallelConfig(tensor=2)), QWEN_7B, 4, H100)
    assert (plan.part("parameters"), plan.part("optimizer")) == (
        four_rank_plan.part("parameters"),
        four_rank_plan.part("optimizer"),
    )


def test_a_rank_of_an_engine_alone_holds_weights_and_cache():
    settings = own_ranks(2, 2, algorithm=AlgorithmConfig(kl_coef=0.1))
    (plan,) = plan_engine_ranks(settings, QWEN_7B, 6, H100)
    assert (plan.rank, plan.name, list(plan.phases)) == (4, "engine rank 4", ["generate"])
    parts = plan.phases["generate"]
    assert parts["engine_weights"] == weight_bytes(QWEN_7B, 2, 2, packed_head=False)
    assert plan.held("generate") == int(0.6 * H100.total_bytes), "whatever is in it"
    assert plan_engine_ranks(config(), QWEN_7B, 6, H100) == []
    (plan,) = plan_engine_ranks(settings, QWEN_7B, 6, CPU)
    assert set(plan.phases["generate"]) == {"engine_weights", "kv_cache"}


def test_an_engine_mesh_counts_from_the_first_rank_of_the_engines():
    settings = own_ranks(4, 2, parallel=ParallelConfig(tensor=2))
    parallel = settings.parallel
    rollout = settings.rollout
    meshes = [engine_mesh_of(rollout, 6, rank) for rank in range(2, 6)]
    assert [(mesh.rank, mesh.engine_index, mesh.is_engine_leader) for mesh in meshes] == [
        (0, 0, True),
        (1, 0, False),
        (2, 1, True),
        (3, 1, False),
    ]
    assert {
        (mesh.world_size, mesh.num_engines, mesh.tensor, mesh.engine_ranks) for mesh in meshes
    } == {(4, 2, 1, 0)}
    assert [mesh_of(parallel, rollout, 6, rank=rank).tensor_rank for rank in range(2)] == [0, 1]
    with pytest.raises(AssertionError):
        mesh_of(parallel, rollout, 6, rank=2)
    for wrong_rank in (1, 6):
        with pytest.raises(AssertionError):
            engine_mesh_of(rollout, 6, wrong_rank)


# ---------------------------------------------------------------- passes


def test_transformer_engines_layer_agrees_with_megatrons_formula():
    """A plain layer in 16 bits takes 34 s b h bytes without attention scores.

    Source: arXiv:2205.05198, equation 2. Of these 2 s b h are dropout masks, which we do not have.
    Our layer has beside them the rotated query and key (2 h), and a gated MLP of 3 F for 2 F."""
    h = ONE_LAYER.hidden_size
    assert ONE_LAYER.ffn_size == 4 * h
    common = layer_elements(ONE_LAYER, work()) - 2 * h - 4 * h
    assert 2 * common == (34 - 2) * h


def test_a_recomputed_mlp_is_there_once():
    """Each of 4 layers keeps its norms' inputs, the first norm's output and its attention.

    The layers are Transformer Engine's; the one whose turn it is in the backward pass has all."""
    selective = PolicyConfig(recompute_granularity="selective")
    middle = work(chunk_layers=4, has_embedding=False, has_head=False, pipelined=True)
    whole = layer_elements(ONE_LAYER, middle)
    kept_elements = layer_elements(ONE_LAYER, middle, selective=True)
    assert (
        whole - kept_elements == 64 + 3 * 256
    )  # the second norm's output; gate, up and their product
    experts = replace(ONE_LAYER, num_experts=8, experts_per_token=2)
    full, recomputed = (layer_elements(experts, middle, selective) for selective in (False, True))
    assert full - recomputed == 2 * (3 * 256 + 64)  # of two experts each, and what they get
    planned = backward_bytes(ONE_LAYER, middle, selective)
    assert planned.activations == 10 * 2 * (4 * kept_elements + 64)
    plain = backward_bytes(ONE_LAYER, middle, PolicyConfig())
    assert planned.working == plain.working + 10 * 2 * (whole - kept_elements)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (PolicyConfig(), 4),
        (
            PolicyConfig(
                recompute_granularity="full", recompute_method="block", recompute_num_layers=1
            ),
            3,
        ),
        (
            PolicyConfig(
                recompute_granularity="full", recompute_method="block", recompute_num_layers=9
            ),
            0,
        ),
        (
            PolicyConfig(
                recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
            ),
            0,
        ),
    ],
)
def test_recomputed_layers_keep_their_inputs_alone(policy: PolicyConfig, kept: int):
    middle = work(chunk_layers=4, has_embedding=False, has_head=False, pipelined=True)
    inputs = {4: 1, 3: 2, 0: 3 if policy.recompute_method == "uniform" else 5}[kept]
    elements = kept * layer_elements(ONE_LAYER, middle) + inputs * 64
    assert backward_bytes(ONE_LAYER, middle, policy).activations == 10 * 2 * elements


def test_stages_hold_the_micro_batches_of_megatrons_schedules():
    assert [in_flight(1, 0, 1), in_flight(2, 0, 1), in_flight(2, 1, 1)] == [1, 2, 1]
    # Interleaved on 2 stages of 2 chunks: 2 x 1 + 2 warm-up passes and one more, then 2 and one
    # more.
    assert [in_flight(2, stage, 2) for stage in (0, 1)] == [5, 3]
    two_in_flight = backward_bytes(ONE_LAYER, work(in_flight=2, has_head=False), PolicyConfig())
    one_in_flight = backward_bytes(ONE_LAYER, work(in_flight=1, has_head=False), PolicyConfig())
    assert two_in_flight.activations == 2 * one_in_flight.activations


# ---------------------------------------------------------------- engines


def test_engine_weights_are_the_models_with_a_table_of_angles():
    angles = 32768 * 128 * 4
    assert weight_bytes(QWEN_7B, 1, 2, packed_head=False) == 2 * PARAMETERS + angles
    # On CPU the head is there twice. 152064 is a multiple of 64: nothing is padded.
    stretched = replace(QWEN_7B, rope_scaling=LinearScaling(4.0))
    assert weight_bytes(stretched, 1, 2, packed_head=False) == 2 * PARAMETERS + 4 * angles
    assert (
        weight_bytes(QWEN_7B, 1, 4, packed_head=True) == 4 * (PARAMETERS + 152064 * 3584) + angles
    )


def test_kv_cache_of_a_token():
    # 28 layers x key and value x 4 heads x 128 x 2 bytes = 56 KiB; 8 ranks copy heads, and have one
    # each.
    assert kv_bytes_per_token(QWEN_7B, 1, 2) == 56 * 1024
    assert kv_bytes_per_token(QWEN_7B, 8, 2) == 14 * 1024
    # 17 tokens fill two blocks of 16, and one is spare.
    assert longest_sequence_bytes(QWEN_7B, 1, 2, 17, "cuda") == 48 * 56 * 1024


def test_the_engine_takes_its_share_of_the_gpu_and_no_more():
    engine = engine_bytes(QWEN_7B, RolloutConfig(memory_share=0.5), "cuda", 2, 80 * GIB)
    assert engine.weights + engine.workspace + engine.kv_cache == 40 * GIB
    without = engine_bytes(
        QWEN_7B, RolloutConfig(memory_share=0.5, cuda_graphs=False), "cuda", 2, 80 * GIB
    )
    assert without.kv_cache > engine.kv_cache and without.asleep == 0
