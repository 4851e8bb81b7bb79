"""What settings, layout and folder become in vLLM's arguments, and what an engine scores."""

from __future__ import annotations

import pytest

from rlmath.config.schema import RolloutConfig
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.engine import Engine
from tests.rollout.scripted_vllm import (
    MODEL_LENGTH,
    TOKENIZER,
    ScriptedLLM,
    scripted_engine,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("process_group")

SHAPES = {"norm.weight": (3, 1)}


def engine_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, ScriptedLLM]:
    """An engine with default settings, and its vLLM."""
    return scripted_engine(
        monkeypatch,
        lambda seed: tokens_of(""),
        Mesh(0, 1, 1, 1, engine_size=1),
        settings=RolloutConfig(),
        shapes=SHAPES,
    )


def test_an_engine_is_opened_with_the_settings_and_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third rank of the second of two engines, on CPU."""
    settings = RolloutConfig(max_num_seqs=7, max_num_batched_tokens=99, cpu_kv_cache_gib=0.25)
    mesh = Mesh(6, 8, 1, 1, engine_size=4)
    engine, llm = scripted_engine(
        monkeypatch, lambda seed: tokens_of(""), mesh, settings=settings, shapes=SHAPES
    )
    arguments = dict(llm.arguments)
    name = arguments.pop("additional_config")["engine_name"]
    assert name.startswith("rlmath-") and name.endswith("-1")
    assert arguments == {
        "model_path": "a folder without a model",
        "max_model_len": MODEL_LENGTH,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 99,
        "kv_cache_memory_bytes": 2**28,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "worker_cls": "rlmath.rollout.cpu_worker.RlmathCPUWorker",
        "tensor_parallel_size": 4,
        "distributed_executor_backend": "external_launcher",
        "seed": 1,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
    }
    assert llm.input_processor.generation_config_fields == {
        "eos_token_id": [TOKENIZER.eos_token_id]
    }
    assert engine.continues_noise and engine.tools is None
    assert engine.memory.kv_cache_bytes == 16 and not engine.memory.keeps_weights


def test_texts_are_scored_in_their_order_whatever_vllm_ends_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = engine_of_one_rank(monkeypatch)
    assert engine.score([[8, 1, 2], [8, 3], [8, 4, 5, 6]]) == [
        [-1 / 8, -2 / 8],
        [-3 / 8],
        [-4 / 8, -5 / 8, -6 / 8],
    ]


def test_new_weights_drop_prefixes_unless_completions_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, llm = engine_of_one_rank(monkeypatch)
    resets = []
    for version, reset in ((3, True), (4, False)):
        engine.set_weight_version(version, reset_prefixes=reset)
        resets.append(llm.prefix_resets)
        running = engine.running_completions(step=version + 5)
        assert (running.weights.version, running.weights.step) == (version, version + 5)
    assert resets == [1, 1]
