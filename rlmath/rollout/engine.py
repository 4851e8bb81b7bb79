"""A vLLM engine inside of the training ranks: how it is built, and what it samples and scores.

`Engine` is that of a run, whose weights come from the policy (`weight_sync`) and which sleeps while
the policy trains (`engine_sleep`); `open_standalone` is one with the weights of a model folder, for
evaluations.
"""

from __future__ import annotations

import itertools
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Completion
from rlmath.checkpoint.hf.config_json import read_shape
from rlmath.config.schema import RolloutConfig
from rlmath.data.stop_tokens import stop_token_ids
from rlmath.distributed import process
from rlmath.distributed.collectives import broadcast_from_rank_zero
from rlmath.distributed.device import SHARED_GPU, Device, prepare_imports, ranks_share_gpus
from rlmath.distributed.device_kind import DeviceKind
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank
from rlmath.rollout.called_completions import CalledCompletions
from rlmath.rollout.engine_adapters import (
    adapter_arguments,
    adapter_request,
    folder_arguments,
    hold_adapter,
    load_adapter,
)
from rlmath.rollout.engine_sleep import EngineMemory, reset_prefix_cache
from rlmath.rollout.engine_weights import EngineWeights
from rlmath.rollout.finished_turns import FinishedTurns
from rlmath.rollout.running_completions import RunningCompletions, Weights
from rlmath.rollout.sampling import Request
from rlmath.telemetry.console import route_library_logs

logger = logging.getLogger(__name__)

_REQUEST_NAMES = itertools.count()

CPU_CHUNKED_PREFILL = False
"""Off: vLLM 0.32 rewinds the generator of a request with a split prompt; torch's on CPU cannot."""

CPU_WORKER = "rlmath.rollout.cpu_worker.RlmathCPUWorker"
SHARED_GPU_WORKER = "rlmath.rollout.shared_gpu_worker.SharedGPUWorker"
LEAST_SHARE = 0.01
"""Share of the device's memory that must be free when vLLM starts with a KV cache of set size."""


def prepare_environment(device_kind: DeviceKind) -> None:
    """Set what vLLM reads from the environment; call it before vLLM is imported."""
    prepare_imports(device_kind)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if (
        "VLLM_CONFIGURE_LOGGING" not in os.environ
    ):  # it logs by itself: the program has no `setup_logging`
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if device_kind == "cpu" else "WARNING")
    route_library_logs()  # vLLM makes torch look for Triton
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device_kind == "cuda":
        # FlashInfer would download or compile kernels when the engine starts.
        os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    if device_kind == "cpu":
        # The system places the one thread of each rank: binding would put all ranks on the same
        # core.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # The second needs Triton; `cpu_worker` knows the first one's batch.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def _cpu_arguments(settings: RolloutConfig) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_chunked_prefill": CPU_CHUNKED_PREFILL,
        "kv_cache_memory_bytes": int(settings.cpu_kv_cache_gib * 2**30),
        "worker_cls": CPU_WORKER,
    }


def _device_arguments(settings: RolloutConfig, device: Device) -> dict[str, Any]:
    if device.kind == "cpu":
        return _cpu_arguments(settings) | _number_formats(device)
    return {
        **_gpu_arguments(settings),
        **_number_formats(device),
        "enable_chunked_prefill": settings.chunked_prefill,
        "enable_sleep_mode": True,
        # Other kernels keep experts in layouts of their own, into which new weights cannot be
        # written.
        "moe_backend": "triton",
    }


def _number_formats(device: Device) -> dict[str, Any]:
    """The policy's number formats; vLLM takes that of the logits from the model's config.json."""
    logits = device.head_dtype
    head = (
        {}
        if logits is None
        else {"hf_overrides": {"head_dtype": str(logits).removeprefix("torch.")}}
    )
    return {"dtype": str(device.params_dtype).removeprefix("torch."), **head}


def _mesh_arguments(settings: RolloutConfig, mesh: Mesh, device_kind: DeviceKind) -> dict[str, Any]:
    """How the engine is spread over ranks, and where they share a GPU.

    A collective of all ranks: our CPU worker needs a name that the ranks of one engine share,
    unique on this machine. On a GPU vLLM's cache of compiled code would begin anew with every name.
    """
    name = f"rlmath-{broadcast_from_rank_zero(uuid.uuid4().hex)}-{mesh.engine_index}"
    return {
        "tensor_parallel_size": mesh.engine_size,
        "distributed_executor_backend": "external_launcher",
        "seed": mesh.engine_index,
        **({"additional_config": {"engine_name": name}} if device_kind == "cpu" else {}),
        **(_shared_gpu_arguments(settings) if device_kind == "cuda" and ranks_share_gpus() else {}),
    }


def _shared_gpu_arguments(settings: RolloutConfig) -> dict[str, Any]:
    """vLLM's arguments for ranks that share a GPU, as docs/gpu.md starts them.

    ValueError where the engine would measure free memory."""
    if settings.kv_cache_gib is None:
        raise ValueError(SHARED_GPU)
    # Both would ask for a GPU behind each rank: the reduction by symmetric memory, and the custom
    # one.
    os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    return {"disable_custom_all_reduce": True}


def _gpu_arguments(settings: RolloutConfig) -> dict[str, Any]:
    cache = settings.kv_cache_gib
    return {
        "enforce_eager": not settings.cuda_graphs,
        "gpu_memory_utilization": settings.memory_share if cache is None else LEAST_SHARE,
        "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
        # Others on the GPU need not be ranks of this process group: engines on ranks of their own,
        # or other runs.
        **({} if cache is None else {"worker_cls": SHARED_GPU_WORKER}),
        "compilation_config": {
            # The fused kernel is FlashInfer's; see `prepare_environment`.
            "pass_config": {"fuse_allreduce_rms": False},
            # Where there is an adapter every request has it.
            "cudagraph_specialize_lora": False,
        },
    }


def _open_llm(
    model_path: str,
    settings: RolloutConfig,
    max_sequence: int,
    device_kind: DeviceKind,
    arguments: Mapping[str, Any],
    stops: Sequence[int] | None,
) -> Any:
    """A vLLM `LLM`; vLLM is imported here, after `prepare_environment`.

    `stops` end a completion; None: what ends one in the folder's own chat template."""
    from vllm import LLM

    from rlmath.rollout.engine_models import register_models
    from rlmath.rollout.scheduler_shortcuts import take_shortcuts

    route_library_logs()

    shape, _ = read_shape(Path(model_path))
    if shape is not None:  # an evaluation may be of another model
        register_models(shape)
    process.freeze_imported_objects()  # vLLM collects garbage three times while it builds an engine
    llm = LLM(
        model_path,
        max_model_len=max_sequence,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
        **arguments,
    )
    model = llm.llm_engine.vllm_config.model_config
    tokenizer = llm.get_tokenizer()
    if stops is None:
        stops = stop_token_ids(model_path, tokenizer, model.get_vocab_size())
    # All requests take them from here; vLLM reads the folder's generation_config.json, and not its
    # chat template.
    llm.llm_engine.input_processor.generation_config_fields["eos_token_id"] = list(stops)
    take_shortcuts(llm)
    if device_kind == "cuda" and environment_rank() == 0 and not samples_in_one_kernel(llm):
        logger.warning(
            "vLLM takes its first model runner for this model or these settings: it samples with "
            "one kernel for each "
            "request and token, which is slower"
        )
    return llm


def samples_in_one_kernel(llm: Any) -> bool:
    """Whether, on GPU, the noise of all requests is drawn at once from seeds and positions.

    vLLM's second model runner does so; the first one draws from every request's generator."""
    return bool(llm.llm_engine.vllm_config.use_v2_model_runner)


def continues_noise(llm: Any) -> bool:
    """Whether the noise of a token follows from its request's seed and its position."""
    is_cpu = llm.llm_engine.vllm_config.device_config.device_type == "cpu"
    return is_cpu or samples_in_one_kernel(llm)


def stop_tokens(llm: Any) -> tuple[int, ...]:
    """The tokens that end a completion of an `LLM` that this module has opened."""
    return tuple(llm.llm_engine.input_processor.generation_config_fields["eos_token_id"])


class Engine:
    """A vLLM engine over `mesh.engine_size` ranks.

    All of them call every method with the same arguments. It starts awake, usually with undefined
    weights: first put it to sleep, or write its `weights`."""

    def __init__(
        self,
        model_path: str,
        settings: RolloutConfig,
        max_sequence: int,
        mesh: Mesh,
        device: Device,
        weight_shapes: Mapping[str, tuple[int, int]],
        load_weights: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        adapter: Path | None = None,
        keeps_weights: bool = False,
        records_routes: bool = False,
    ) -> None:
        """`max_sequence` is the longest prompt plus completion (tokens).

        `weight_shapes` are the rows and columns of every parameter of one rank, and of every buffer
        of the adapters that it holds (`shard_layouts.engine_shapes`). With
        `load_weights` it starts with the weights of the folder, and with the adapters of the PEFT
        folder `adapter`, else with adapters of zeros; with `keeps_weights` the weights stay while
        it sleeps. `stop_token_ids` end a completion; None: those of the folder's own chat template.
        One that `records_routes` keeps the experts of each token, on CPU alone.
        """
        prepare_environment(device.kind)
        self._settings = settings
        self._device_kind: DeviceKind = device.kind
        arguments = _device_arguments(settings, device) | {
            **_mesh_arguments(settings, mesh, device.kind),
            **adapter_arguments(weight_shapes),
            "load_format": "auto" if load_weights else "dummy",
        }
        self._llm = _open_llm(
            model_path,
            settings,
            max_sequence,
            device_kind=device.kind,
            arguments=arguments,
            stops=stop_token_ids,
        )
        self._adapter = adapter_request(self._llm)
        if adapter is not None:
            load_adapter(self._llm, adapter)
        elif self._adapter is not None:
            hold_adapter(self._llm)
        if records_routes:
            self._llm.collective_rpc("record_routes")
        (model,) = self._llm.collective_rpc(lambda worker: worker.get_model())
        self.weights = EngineWeights(model, weight_shapes)
        self.memory = EngineMemory(
            self._llm, self.weights, device.kind, keeps_weights=keeps_weights
        )
        self.on_step: Callable[[], None] = lambda: None
        """Called before every step of vLLM while it samples: progress for the heartbeat."""
        self.tools: CalledCompletions | None = None
        """Answer the calls of completions; None: there are no tools."""
        self.version = 0
        """Version of the policy's weights that it has: their number of optimizer steps."""

    def set_weight_version(self, version: int, reset_prefixes: bool = True) -> None:
        """Call it once `weights` are written.

        Drops prefixes that were cached with old weights, unless running requests use them."""
        if reset_prefixes:
            reset_prefix_cache(self._llm)
        self.version = version

    def reset_prefix_cache(self) -> None:
        reset_prefix_cache(self._llm)

    @property
    def continues_noise(self) -> bool:
        """Whether the noise of a token follows from its request's seed and its position.

        A completion that is sampled in slices is then the same as a whole one."""
        return self._device_kind == "cpu" or samples_in_one_kernel(self._llm)

    def running_completions(
        self,
        step: int = 0,
        tokenizer: PreTrainedTokenizerFast | None = None,
        score: Callable[[Request, Completion], None] = lambda request, completion: None,
        keeps_cache: bool = False,
        with_routes: bool = False,
        turns: FinishedTurns | None = None,
    ) -> RunningCompletions:
        """A new `RunningCompletions`, which samples with the engine's weights.

        `step` is the step, counted from 0, that samples. With `with_routes`, for which the
        engine must record them, completions end with their routes. `turns` answer finished turns,
        where there are no tools."""
        return RunningCompletions(
            self._llm,
            self._settings,
            weights=Weights(self.version, step),
            tokenizer=tokenizer,
            score=score,
            on_step=lambda: self.on_step(),
            keeps_cache=keeps_cache,
            tools=self.tools if turns is None else turns,
            routes_of=self._routes_of if with_routes else None,
        )

    def _routes_of(self, name: str, first: int, end: int) -> Tensor:
        (routes_TLK,) = self._llm.collective_rpc("routes_of", args=(name, first, end))
        return routes_TLK

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of every token but the first of each sequence."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        # vLLM returns the log-probs of prompts only with completions.
        parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False
        )
        engine = self._llm.llm_engine
        index_of = {}
        for index, token_ids in enumerate(sequences):
            name = f"score-{next(_REQUEST_NAMES)}"
            index_of[name] = index
            engine.add_request(
                name, tokens_input(list(token_ids)), parameters, lora_request=self._adapter
            )
        logprobs: dict[int, list[float]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
                    logprobs[index_of[output.request_id]] = [
                        row[token].logprob for token, row in rows
                    ]
        return [logprobs[index] for index in range(len(sequences))]

    def close(self) -> None:
        """`end_engine`: close it last."""
        end_engine(self._llm, self._device_kind)


def end_engine(llm: Any, device_kind: DeviceKind) -> None:
    """End a vLLM engine and the process's own process group.

    On GPU the end of the process frees both, and vLLM's finalizer is detached: it would free memory
    that its sleep has freed already."""
    core = llm.llm_engine.engine_core
    if device_kind == "cpu":
        core.shutdown()
    else:
        core._finalizer.detach()


def open_standalone(
    model_path: str,
    settings: RolloutConfig,
    max_sequence: int,
    device_kind: DeviceKind,
    mesh: Mesh | None = None,
    stop_token_ids: Sequence[int] | None = None,
    adapter: Path | None = None,
) -> Any:
    """A vLLM `LLM` with the weights of a Hugging Face folder, without the trainer.

    `adapter` is a PEFT folder whose adapters it has, unmerged. It runs in one process, or with a
    `mesh` it is the engine that this rank is part of, which every rank of a process group opens."""
    prepare_environment(device_kind)
    if device_kind == "cpu":
        arguments = _cpu_arguments(settings)
    else:
        arguments = _gpu_arguments(settings) | {"dtype": "auto"}
    if mesh is not None:
        arguments |= _mesh_arguments(settings, mesh, device_kind)
    if adapter is not None:
        arguments |= folder_arguments(adapter)
    llm = _open_llm(
        model_path,
        settings,
        max_sequence,
        device_kind=device_kind,
        arguments=arguments,
        stops=stop_token_ids,
    )
    if adapter is not None:
        load_adapter(llm, adapter)
    return llm
