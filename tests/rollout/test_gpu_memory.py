"""vLLM's own code for memory on a GPU, as far as it runs without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.rollout.engine import prepare_environment

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm.device_allocator import AllocationData, cumem  # noqa: E402

from rlmath.rollout.engine_sleep import EngineMemory, allocator_bytes  # noqa: E402
from rlmath.rollout.shared_gpu_worker import SharedGPUWorker, Worker  # noqa: E402


def asleep(worker: type[Worker], monkeypatch: pytest.MonkeyPatch, freed: list[int]) -> list[int]:
    """The levels of the sleeps of a worker whose model is one matrix.

    `freed` is the free memory of the device, each time that it is asked for."""
    free = iter(freed)
    levels = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(free), 100))
    sleeping_worker: Any = object.__new__(worker)
    sleeping_worker.model_runner = SimpleNamespace(model=torch.nn.Linear(2, 3))
    sleeping_worker.get_draft_model = lambda: None
    sleeping_worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_nccl_comm_suspend=False)
    )
    sleeping_worker._sleep_mode_backend = SimpleNamespace(suspend=levels.append)
    sleeping_worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=())
    sleeping_worker.sleep(2)
    return levels


def test_a_sleep_may_free_less_than_other_ranks_on_the_gpu_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asleep(Worker, monkeypatch, [10, 60]) == [2]
    with pytest.raises(AssertionError, match="Memory usage increased"):
        asleep(Worker, monkeypatch, [60, 10])
    assert asleep(SharedGPUWorker, monkeypatch, [60, 10]) == [2]


def test_another_failure_of_a_sleep_is_one_on_a_shared_gpu_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(worker: Worker, level: int) -> None:
        raise AssertionError("the allocator is not available")

    monkeypatch.setattr(Worker, "sleep", fail)
    with pytest.raises(AssertionError, match="not available"):
        asleep(SharedGPUWorker, monkeypatch, [])


def test_weights_take_what_the_allocator_holds_beside_the_kv_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their memory comes in pieces of 2 and 20 MiB: the sum of the parameters is less."""
    allocator = object.__new__(cumem.CuMemAllocator)
    sizes = {"weights": 20 * 2**20, "more weights": 2 * 2**20, "kv_cache": 2**30}
    allocator.pointer_to_data = {
        number: AllocationData((0, size, number, 0), tag)
        for number, (tag, size) in enumerate(sizes.items())
    }
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    llm = SimpleNamespace(collective_rpc=lambda method: [2**30])
    assert EngineMemory(llm, SimpleNamespace(bytes=5), "cuda").waking_bytes == 22 * 2**20
    assert EngineMemory(llm, SimpleNamespace(bytes=5), "cpu").waking_bytes == 5
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    assert allocator_bytes() == 0
