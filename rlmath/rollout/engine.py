"""One vLLM engine in the training ranks' own processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlmath.config import RolloutConfig
from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.rollout.memory import CPU_WORKER_EXTENSION, MemorySwitch


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    key: tuple[int, int]
    """(position of the prompt in the step's batch, sample index)."""
    token_ids: tuple[int, ...]
    """The prompt."""
    seed: int


@dataclass(frozen=True)
class Generated:
    """What came of a request."""

    key: tuple[int, int]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


def request_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one completion, the same whichever engine samples it (0 to 2**63 - 1)."""
    text = f"{run_seed}/{step}/{sample_index}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def prepare_environment(device_kind: str) -> None:
    """Settings that vLLM reads from the environment; call before it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if device_kind == "cpu":
        # One thread per rank, placed by the system: binding would put all ranks on the same core.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def _device_arguments(settings: RolloutConfig, device: Device) -> dict[str, Any]:
    if device.kind == "cpu":
        return {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(settings.cpu_kv_cache_gib * 2**30),
            "worker_extension_cls": CPU_WORKER_EXTENSION,
        }
    return {
        "dtype": "bfloat16",
        "enforce_eager": not settings.cuda_graphs,
        "gpu_memory_utilization": settings.memory_share,
        "enable_sleep_mode": True,
    }


class Engine:
    """A vLLM engine over `mesh.engine_size` ranks, which all call every method with the same arguments.

    It starts with undefined weights and awake: sleep it, or load weights, before anything else.
    """

    def __init__(
        self, model_path: str, settings: RolloutConfig, max_sequence: int, mesh: Mesh, device: Device
    ) -> None:
        prepare_environment(device.kind)
        from vllm import LLM

        self._settings = settings
        self._llm = LLM(
            model_path,
            tensor_parallel_size=mesh.engine_size,
            distributed_executor_backend="external_launcher",
            load_format="dummy",
            seed=mesh.engine_index,
            max_model_len=max_sequence,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_chunked_prefill=settings.chunked_prefill,
            logprobs_mode="processed_logprobs",
            **_device_arguments(settings, device),
        )
        self.memory = MemorySwitch(self._llm, device.kind)

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Replace all weights by the streamed Hugging Face tensors and forget cached prefixes."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        for _ in tensors:
            # vLLM skips a tied head; the stream is a collective and must be consumed to its end everywhere.
            pass
        self._llm.reset_prefix_cache()

    def generate(self, requests: Sequence[Request]) -> Iterator[Generated]:
        """Sample all requests; yields each as soon as it is finished."""
        engine = self._llm.llm_engine
        pending = {}
        for number, request in enumerate(requests):
            pending[str(number)] = request.key
            engine.add_request(
                str(number), {"prompt_token_ids": list(request.token_ids)}, self._sampling(request.seed)
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield _generated(pending.pop(output.request_id), output.outputs[0])
        assert not pending, f"vLLM did not return requests {sorted(pending)}"

    def _sampling(self, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = self._settings
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_new_tokens,
            min_tokens=settings.min_new_tokens,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _generated(key: tuple[int, int], output: Any) -> Generated:
    token_ids = tuple(output.token_ids)
    logprobs = tuple(output.logprobs.logprobs)
    assert len(logprobs) == len(token_ids), "vLLM returned another number of log-probs than tokens"
    return Generated(key, token_ids, logprobs, output.finish_reason)
