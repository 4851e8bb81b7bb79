"""A vLLM that runs no model, for tests of what is around it.

A test says what each seed samples. A token follows from seed and position, as with our sampler on
CPU: a completion that is cut and goes on is the same as a whole one.
"""

# Shape legend: R requests of a step.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.config.schema import RolloutConfig
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.engine import Engine, prepare_environment
from tests.data.chat_templates import chat_tokenizer
from tests.rollout.bare_models import model_with
from tests.rollout.core_queue import CoreQueue

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
import vllm  # noqa: E402

TOKENIZER = chat_tokenizer("qwen3")
PROMPT_IDS = (5, 6)
"""Tokens of every prompt."""
CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
MODEL_LENGTH = 64


def tokens_of(text: str) -> list[int]:
    """The tokens of a completion that says this and stops."""
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def logprob_of(seed: int, position: int) -> float:
    """The log-prob of the token that a seed samples at a position (nats); it is exact in float32."""
    return -(1 + (seed + position) % 64) / 64


class ScriptedLLM(CoreQueue):
    """Stands for vLLM's `LLM`, and for its engine, core and scheduler."""

    def __init__(
        self,
        model_path: str,
        script: Callable[[int], Sequence[int]],
        model: torch.nn.Module,
        max_num_seqs: int,
        **arguments: Any,
    ) -> None:
        """`script` gives the tokens that a seed samples, to their end."""
        self.arguments = {"model_path": model_path, "max_num_seqs": max_num_seqs} | arguments
        self.begun: list[Any] = []
        """All requests of completions, in order."""
        self.prefix_resets = 0
        super().__init__(max_num_seqs)
        self._sampled: dict[str, int] = {}
        """Tokens that a request has sampled since it began, by name."""
        self._script = script
        runner = SimpleNamespace(kv_caches=[torch.zeros(4)])
        self._worker = SimpleNamespace(get_model=lambda: model, model_runner=runner)
        self.llm_engine = self.engine_core = self.scheduler = self
        self.input_processor = SimpleNamespace(
            process_inputs=self._process, generation_config_fields={}
        )
        self.kv_cache_manager = SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=[])
        )
        self.vllm_config = SimpleNamespace(
            lora_config=None,
            use_v2_model_runner=False,
            device_config=SimpleNamespace(device_type="cpu"),
            model_config=SimpleNamespace(get_vocab_size=lambda: len(TOKENIZER)),
        )
        self.output_processor = SimpleNamespace(request_states={})
        self._scoring: list[tuple[str, list[int]]] = []

    # ------------------------------------------------------------ the `LLM`

    def get_tokenizer(self) -> Any:
        return TOKENIZER

    def collective_rpc(self, method: str | Callable[[Any], Any]) -> list[Any]:
        """A method of our worker, by its name, does nothing."""
        return [None if isinstance(method, str) else method(self._worker)]

    def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return not self.requests

    def shutdown(self) -> None:
        pass

    # ------------------------------------------------------------ its engine

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _process(self, name: str, prompt: Any, parameters: Any, **options: Any) -> Any:
        return SimpleNamespace(request_id=name, prompt=prompt, sampling_params=parameters)

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert not names, "nobody asks the `LLM` itself for completions"

    def has_unfinished_requests(self) -> bool:
        return bool(self._scoring)

    def step(self) -> list[Any]:
        """The log-probs of one text that is to be scored, the last one first."""
        name, token_ids = self._scoring.pop()
        logprobs = [
            {token: SimpleNamespace(logprob=-token / 8)} if position else None
            for position, token in enumerate(token_ids)
        ]
        output = SimpleNamespace(
            request_id=name, finished=True, prompt_token_ids=token_ids, prompt_logprobs=logprobs
        )
        return [output]

    # ------------------------------------------------------------ its core and scheduler

    def add_request(self, request: Any, *text: Any, lora_request: Any = None) -> None:
        """A completion's request for the core; a name with a prompt is a text to score."""
        if text:
            self._scoring.append((request, text[0]["prompt_token_ids"]))
            return
        self.begun.append(request)
        self._sampled[request.request_id] = 0
        self._add(request)

    def get_output(self) -> Any:
        self._begin_waiting()
        logprobs_R = [
            logprob_of(request.sampling_params.seed, self._position(request))
            for request in self._running
        ]
        logprobs = SimpleNamespace(
            cu_num_generated_tokens=None, logprobs=torch.tensor(logprobs_R)[:, None]
        )
        return self.update_from_output(None, SimpleNamespace(logprobs=logprobs))

    def update_from_output(self, scheduled: Any, output: Any) -> Any:
        outputs = []
        for row, request in enumerate(list(self._running)):
            parameters = request.sampling_params
            token = self._script(parameters.seed)[self._position(request) - len(PROMPT_IDS)]
            self._sampled[request.request_id] += 1
            reason = None
            if token in self.input_processor.generation_config_fields["eos_token_id"]:
                reason = "stop"
            elif self._sampled[request.request_id] == parameters.max_tokens:
                reason = "length"
            if reason is not None:
                self._remove(request)
            outputs.append(
                SimpleNamespace(
                    request_id=request.request_id,
                    new_token_ids=[token],
                    new_logprobs=output.logprobs.slice_request(row, 1),
                    finish_reason=reason,
                )
            )
        return SimpleNamespace(outputs=outputs)

    def _position(self, request: Any) -> int:
        """The position of a request's next token, behind its prompt."""
        return len(request.prompt["prompt_token_ids"]) + self._sampled[request.request_id]


def scripted_engine(
    patch: pytest.MonkeyPatch,
    script: Callable[[int], Sequence[int]],
    mesh: Mesh,
    *,
    settings: RolloutConfig,
    shapes: dict[str, tuple[int, int]],
    folder: Path = Path("a folder without a model"),
) -> tuple[Engine, ScriptedLLM]:
    """Our engine, around a vLLM with this script; needs a process group."""
    opened: list[ScriptedLLM] = []

    def open_llm(model_path: str, **arguments: Any) -> ScriptedLLM:
        llm = ScriptedLLM(model_path, script=script, model=model_with(shapes), **arguments)
        opened.append(llm)
        return llm

    patch.setitem(vllm.__dict__, "LLM", open_llm)
    engine = Engine(
        str(folder),
        settings,
        MODEL_LENGTH,
        mesh=mesh,
        device=CPU,
        weight_shapes=shapes,
        stop_token_ids=[TOKENIZER.eos_token_id],
    )
    return engine, opened[0]
