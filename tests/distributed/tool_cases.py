"""What the ranks do in the tests of completions with calls: a model follows a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from rlmath.algorithms.partial_rollouts import UnfinishedGroup, UnfinishedGroups
from rlmath.algorithms.types import Completion, PartialCompletion, Prompt
from rlmath.checkpoint.unfinished_groups import read_unfinished, write_unfinished
from rlmath.config.schema import RewardConfig, RolloutConfig, ToolsConfig
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.running_completions import Usage
from rlmath.rollout.sampling import Key, Request
from tests.disturbed_sandboxes import DelayedSandboxes, open_light_sandboxes
from tests.tiny_models import shape_of
from tests.tool_models import EOS, PROMPT, SIZE, chat_number_of, number_of

ROLLOUT = RolloutConfig(
    group_size=12, max_new_tokens=30, max_num_seqs=8, cpu_kv_cache_gib=0.1, progress_bar=False
)
TOOLS = ToolsConfig(format="fence", max_calls=3, max_output_tokens=64, cores=1, sessions=4)
LONGEST = 4 + 30 + 3 * 80
LONGEST_CHAT = 4 + 30 + 3 * (64 + 64)
SLICES = (1, 4, 7)
RESUMED_SLICES = 4
"""They end in code, behind a call, before its turn's end, and in an answer."""
LATE = (1, 2)
"""Tokens that an engine samples behind those that it has returned."""
OpenSandboxes = Callable[[ToolsConfig], Any]
"""Opens the sandboxes of an engine's leader, or what stands around them."""


@dataclass
class Called:
    """What an engine samples, by the keys of the requests."""

    completions: dict[Key, Completion]
    scored: dict[Key, Completion]
    """Completions as they are scored, on the leader alone."""
    again: dict[Key, list[float]]
    """Log-probs of the tokens of the completions, computed in one pass."""
    late: list[dict[Key, Completion]]
    """The same completions from an engine that returns tokens late, by LATE."""
    sliced: list[dict[Key, Completion]]
    """The same completions in slices of so many sampled tokens, by SLICES."""
    fresh: dict[Key, Completion]
    """The completions, where calls know nothing of each other."""
    refusal: str
    """How a rollout ends whose sandboxes' server is killed whenever it has a call."""
    first: Completion
    """The first completion, where the engine has no other."""
    waiting_seconds: float
    """Seconds for which the engine only waited for its calls."""


class ScriptedEngine:
    """An engine over all ranks whose model follows a script, and what it samples with tools."""

    def __init__(self, folder: Path, engine_size: int, tools: ToolsConfig = TOOLS) -> None:
        """`tools` are of the form in which the script of the folder's model calls."""
        from rlmath.data.chat import ChatSettings
        from rlmath.data.tokenizer import load_tokenizer
        from rlmath.data.tool_chats import PYTHON
        from rlmath.rollout.engine import Engine
        from rlmath.rollout.weight_sync.shard_layouts import engine_shapes

        in_chat = tools.format == "chat"
        device = open_device("cpu")
        init_process_group(device, 120.0)
        self.tools = tools
        self.mesh = Mesh(
            dist.get_rank(), dist.get_world_size(), 1, pipeline=1, engine_size=engine_size
        )
        self.engine = Engine(
            str(folder),
            ROLLOUT,
            LONGEST_CHAT if in_chat else LONGEST,
            mesh=self.mesh,
            device=device,
            weight_shapes=engine_shapes(shape_of(folder), engine_size),
            load_weights=True,
        )
        self.engine.version = 5
        chat = ChatSettings(tool=PYTHON) if in_chat else ChatSettings()
        self.tokenizer = load_tokenizer(str(folder), settings=chat)
        self.prompt = tuple(map(chat_number_of if in_chat else number_of, PROMPT))
        self.scored: dict[Key, Completion] = {}
        """Completions as they were scored last, on the leader alone."""
        self.usage = Usage()
        """What the engine did for its last completions."""

    def sample(
        self,
        samples: int,
        opens: OpenSandboxes = open_light_sandboxes,
        *,
        settings: ToolsConfig | None = None,
        slice_tokens: int | None = None,
        resumes: bool = False,
    ) -> dict[Key, Completion]:
        """Completions of the script's prompt, whole or in slices of so many sampled tokens.

        `opens` opens the leader's sandboxes. With `resumes` a slice begins as in another process:
        from a checkpoint, with new sandboxes."""
        settings = settings or self.tools
        finished: dict[Key, Completion] = {}
        requests = [
            Request((0, g), self.prompt, seed=1000 + g, min_new_tokens=0, max_new_tokens=30)
            for g in range(samples)
        ]
        self._open_tools(settings, opens)
        while requests:
            slices = [replace(request, slice_tokens=slice_tokens) for request in requests]
            requests = []
            for ended in self._ended(slices):
                if isinstance(ended.completion, Completion):
                    finished[ended.request.key] = ended.completion
                else:
                    requests.append(ended.request)
            if resumes and requests:
                requests = from_checkpoint(requests)
                self._close_tools()
                self._open_tools(settings, opens)
        self._close_tools()
        return dict(sorted(finished.items()))

    def sample_sliced(
        self, samples: int, opens: OpenSandboxes = open_light_sandboxes
    ) -> list[dict[Key, Completion]]:
        """The completions in slices, by SLICES; those of RESUMED_SLICES are resumed."""
        return [
            self.sample(samples, opens, slice_tokens=tokens, resumes=tokens == RESUMED_SLICES)
            for tokens in SLICES
        ]

    def _ended(self, requests: list[Request]) -> Iterator[Any]:
        """The completions at their end or at that of their slice, which has its tokens."""

        def score(request: Request, completion: Completion) -> None:
            self.scored[request.key] = completion

        tokenizer = self.tokenizer if self.mesh.is_engine_leader else None
        asked = {request.key: request for request in requests}
        running = self.engine.running_completions(2, tokenizer, score)
        self.usage = running.usage
        for ended in running.sample(requests):
            request = asked[ended.request.key]
            new_tokens = ended.completion.n_sampled - request.so_far.n_sampled
            if not isinstance(ended.completion, Completion):
                assert new_tokens == request.slice_tokens
            else:
                assert request.slice_tokens is None or new_tokens <= request.slice_tokens
            yield ended

    def _open_tools(self, settings: ToolsConfig, opens: OpenSandboxes) -> None:
        """Open the engine's tools as a run does."""
        from rlmath.rollout import engine_tools

        with mock.patch.object(engine_tools, "open_sandboxes", opens):
            self.engine.tools = engine_tools.open_tools(
                settings,
                self.tokenizer,
                self.mesh,
                continues_noise=self.engine.continues_noise,
                stop_token_ids=(EOS,),
            )

    def _close_tools(self) -> None:
        assert self.engine.tools is not None
        self.engine.tools.close()
        self.engine.on_step = lambda: None


def from_checkpoint(requests: list[Request]) -> list[Request]:
    """The requests with what a checkpoint says of their completions."""
    group = UnfinishedGroup(0, 2, tuple(request.so_far for request in requests))
    content = write_unfinished(UnfinishedGroups([group], next_draw=1))
    (read,) = read_unfinished(content, len(requests), SIZE, lambda *_: "").groups
    return [
        replace(request, so_far=part)
        for request, part in zip(requests, read.samples, strict=True)
        if isinstance(part, PartialCompletion)
    ]


def called(folder: Path, engine_size: int) -> Called:
    """All that an engine over all ranks samples with tools.

    Calls of several ranks have their results late."""
    from rlmath.rollout.called_completions import open_sandboxes

    engine = ScriptedEngine(folder, engine_size)
    several = engine_size > 1
    samples = ROLLOUT.group_size
    first = engine.sample(1)[0, 0]
    waiting_seconds = engine.usage.waiting_seconds
    completions = engine.sample(samples, open_late_sandboxes if several else open_sandboxes)
    whole = dict(engine.scored)
    scores = engine.engine.score([(*engine.prompt, *c.token_ids) for c in completions.values()])
    again = {
        key: logprobs[len(engine.prompt) - 1 :]
        for key, logprobs in zip(completions, scores, strict=True)
    }
    late = []
    core = engine.engine._llm.llm_engine.engine_core
    get_output = core.get_output
    for tokens in () if several else LATE:
        core.get_output = delayed(get_output, tokens)
        late.append(engine.sample(samples))
    core.get_output = get_output
    sliced = engine.sample_sliced(samples, open_late_sandboxes if several else open_light_sandboxes)
    fresh = engine.sample(samples, settings=replace(TOOLS, state="fresh"))
    refusal = "" if several else rollout_error(engine.engine, engine.mesh, engine.tokenizer)
    engine.engine.close()
    return Called(
        completions,
        whole,
        again,
        late=late,
        sliced=sliced,
        fresh=fresh,
        refusal=refusal,
        first=first,
        waiting_seconds=waiting_seconds,
    )


@dataclass
class CalledInChat:
    """What an engine samples in a chat, by the keys of the requests."""

    completions: dict[Key, Completion]
    scored: dict[Key, Completion]
    """Completions as they are scored, on the leader alone."""
    sliced: list[dict[Key, Completion]]
    """The same completions in slices of so many sampled tokens, by SLICES."""


def called_in_chat(folder: Path, engine_size: int) -> CalledInChat:
    """What an engine over all ranks samples with tools in the form of the model's template."""
    engine = ScriptedEngine(folder, engine_size, replace(TOOLS, format="chat"))
    opens = open_late_sandboxes if engine_size > 1 else open_light_sandboxes
    completions = engine.sample(24, opens)
    scored = dict(engine.scored)
    sliced = engine.sample_sliced(24, opens)
    engine.engine.close()
    return CalledInChat(completions, scored, sliced)


def open_late_sandboxes(settings: ToolsConfig) -> DelayedSandboxes:
    return DelayedSandboxes(open_light_sandboxes(settings), seed=3)


def rollout_error(engine: Any, mesh: Mesh, tokenizer: Any) -> str:
    """The error of a whole rollout whose sandboxes are killed."""
    from rlmath.data.tool_formats import open_format
    from rlmath.rewards.reward_manager import open_reward_workers
    from rlmath.rollout.called_completions import CalledCompletions, open_sandboxes
    from rlmath.rollout.collector import CollectGroups, Collector
    from rlmath.rollout.sampling import RolloutSeed, training_sampling

    pool = open_reward_workers(RewardConfig())
    sandboxes = open_sandboxes(TOOLS)
    engine.tools = CalledCompletions(TOOLS, open_format(tokenizer, TOOLS), sandboxes)
    engine.on_step = killer(sandboxes)
    collector = Collector(
        engine, mesh, tokenizer, rollout=ROLLOUT, reward=RewardConfig(), pool=pool
    )
    prompt = Prompt("q", PROMPT, tuple(map(number_of, PROMPT)), solutions=("42",), task="math")
    sampling = replace(training_sampling(ROLLOUT), samples=8)
    command = CollectGroups([prompt], sampling, RolloutSeed(1, 0), "")
    try:
        collector.collect(command)
    except RuntimeError as error:
        return str(error)
    finally:
        sandboxes.close()
        pool.close()
    return ""


def delayed(get_output: Callable[[], Any], tokens: int) -> Callable[[], Any]:
    """vLLM's steps, `tokens` + 1 at a time, whose tokens come together."""

    def get_outputs() -> Any:
        outputs = get_output()
        merged = {output.request_id: output for output in outputs.outputs}
        for _ in range(tokens):
            for output in get_output().outputs:
                first = merged.get(output.request_id)
                if first is None:
                    merged[output.request_id] = output
                    continue
                first.new_token_ids = [*first.new_token_ids, *output.new_token_ids]
                first.new_logprobs = [*first.new_logprobs, *output.new_logprobs]
                first.finish_reason = output.finish_reason
        outputs.outputs = list(merged.values())
        return outputs

    return get_outputs


def killer(sandboxes: Any) -> Callable[[], None]:
    """Kills every server of the sandboxes that has a call, once each."""
    killed: set[int] = set()

    def kill() -> None:
        if sandboxes.pending and sandboxes.server_pid not in killed:
            killed.add(sandboxes.server_pid)
            os.kill(sandboxes.server_pid, signal.SIGKILL)

    return kill
