"""What the ranks do in the tests of completions with calls: a model follows a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlmath.algorithms.types import Completion, Prompt
from rlmath.config.schema import RewardConfig, RolloutConfig, ToolsConfig
from rlmath.distributed.device import init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.running_completions import Usage
from rlmath.rollout.sampling import Key, Request
from tests.tiny_models import shape_of
from tests.tool_models import PROMPT, chat_number_of, number_of

ROLLOUT = RolloutConfig(
    group_size=12, max_new_tokens=30, max_num_seqs=8, cpu_kv_cache_gib=0.1, progress_bar=False
)
TOOLS = ToolsConfig(format="fence", max_calls=3, max_output_tokens=64, cores=1, sessions=4)
LONGEST = 4 + 30 + 3 * 80
LONGEST_CHAT = 4 + 30 + 3 * (64 + 64)
CHAT_PROMPT = tuple(map(chat_number_of, PROMPT))
SLICES = (1, 4, 7)
LATE = (1, 2)
"""Tokens that an engine samples behind those that it has returned."""


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
    lost: dict[Key, Completion]
    """Completions whose sandboxes' server is killed whenever it runs."""
    refusal: str
    """How a rollout ends most of whose completions are so lost."""
    first: Completion
    """The first completion, where the engine has no other."""
    waiting_seconds: float
    """Seconds for which the engine only waited for its calls."""


def requests_of(samples: int) -> list[Request]:
    tokens = tuple(map(number_of, PROMPT))
    return [
        Request((0, g), tokens, seed=1000 + g, min_new_tokens=0, max_new_tokens=30)
        for g in range(samples)
    ]


def called(folder: Path, engine_size: int) -> Called:
    """All that an engine over all ranks samples with tools."""
    from rlmath.data.tokenizer import load_tokenizer
    from rlmath.data.tool_formats import open_format
    from rlmath.rollout.called_completions import CalledCompletions, open_sandboxes
    from rlmath.rollout.engine import Engine
    from rlmath.rollout.weight_sync.shard_layouts import engine_shapes
    from rlmath.rollout.work_queue import share_in_engine

    device = open_device("cpu")
    init_process_group(device, 120.0)
    mesh = Mesh(dist.get_rank(), dist.get_world_size(), 1, pipeline=1, engine_size=engine_size)
    shapes = engine_shapes(shape_of(folder), engine_size)
    engine = Engine(
        str(folder),
        ROLLOUT,
        LONGEST,
        mesh=mesh,
        device=device,
        weight_shapes=shapes,
        load_weights=True,
    )
    engine.version = 5
    tokenizer = load_tokenizer(str(folder))
    scored: dict[Key, Completion] = {}
    usages: list[Usage] = []
    """One for every call of `sample`."""

    def score(request: Request, completion: Completion) -> None:
        scored[request.key] = completion

    def sample(
        samples: int,
        settings: ToolsConfig = TOOLS,
        kills: bool = False,
        slice_tokens: int | None = None,
    ) -> dict:
        sandboxes = open_sandboxes(settings) if mesh.is_engine_leader else None
        share = share_in_engine if engine_size > 1 else None
        tool_format = open_format(tokenizer, settings)
        engine.tools = CalledCompletions(settings, tool_format, sandboxes, share=share)
        engine.on_step = killer(sandboxes) if kills and sandboxes else lambda: None
        own_tokenizer = tokenizer if mesh.is_engine_leader else None
        running = engine.running_completions(2, own_tokenizer, score)
        usages.append(running.usage)
        requests = requests_of(samples)
        finished = {}
        while requests:
            slices = [replace(request, slice_tokens=slice_tokens) for request in requests]
            before = {request.key: request.so_far.n_sampled for request in requests}
            requests = []
            for ended in running.sample(slices):
                new_tokens = ended.completion.n_sampled - before[ended.request.key]
                if isinstance(ended.completion, Completion):
                    assert slice_tokens is None or new_tokens <= slice_tokens
                    finished[ended.request.key] = ended.completion
                else:
                    assert new_tokens == slice_tokens
                    requests.append(ended.request)
        if sandboxes is not None:
            sandboxes.close()
        return dict(sorted(finished.items()))

    first = sample(1)[0, 0]
    completions = sample(ROLLOUT.group_size)
    whole = dict(scored)
    prompt = tuple(map(number_of, PROMPT))
    scores = engine.score([(*prompt, *c.token_ids) for c in completions.values()])
    again = {
        key: logprobs[len(prompt) - 1 :] for key, logprobs in zip(completions, scores, strict=True)
    }
    late = []
    get_output = engine._llm.llm_engine.engine_core.get_output
    for tokens in LATE if engine_size == 1 else ():
        engine._llm.llm_engine.engine_core.get_output = delayed(get_output, tokens)
        late.append(sample(ROLLOUT.group_size))
    engine._llm.llm_engine.engine_core.get_output = get_output
    sliced = [sample(ROLLOUT.group_size, slice_tokens=tokens) for tokens in SLICES]
    fresh = sample(ROLLOUT.group_size, replace(TOOLS, state="fresh"))
    lost = sample(2, kills=True) if engine_size == 1 else {}
    refusal = rollout_error(engine, mesh, tokenizer) if engine_size == 1 else ""
    engine.close()
    return Called(
        completions,
        whole,
        again,
        late=late,
        sliced=sliced,
        fresh=fresh,
        lost=lost,
        refusal=refusal,
        first=first,
        waiting_seconds=usages[0].waiting_seconds,
    )


def called_in_chat(folder: Path) -> dict[Key, Completion]:
    """Scored completions of an engine with tools in the form of the model's chat template."""
    from rlmath.data.chat import ChatSettings
    from rlmath.data.tokenizer import load_tokenizer
    from rlmath.data.tool_chats import PYTHON
    from rlmath.data.tool_formats import open_format
    from rlmath.rollout.called_completions import CalledCompletions, open_sandboxes
    from rlmath.rollout.engine import Engine
    from rlmath.rollout.weight_sync.shard_layouts import engine_shapes

    device = open_device("cpu")
    init_process_group(device, 120.0)
    mesh = Mesh(0, 1, 1, pipeline=1, engine_size=1)
    engine = Engine(
        str(folder),
        ROLLOUT,
        LONGEST_CHAT,
        mesh=mesh,
        device=device,
        weight_shapes=engine_shapes(shape_of(folder), 1),
        load_weights=True,
    )
    tokenizer = load_tokenizer(str(folder), settings=ChatSettings(tool=PYTHON))
    tools = replace(TOOLS, format="chat")
    sandboxes = open_sandboxes(tools)
    engine.tools = CalledCompletions(tools, open_format(tokenizer, tools), sandboxes)
    scored: dict[Key, Completion] = {}

    def score(request: Request, completion: Completion) -> None:
        scored[request.key] = completion

    running = engine.running_completions(2, tokenizer, score)
    requests = [replace(request, token_ids=CHAT_PROMPT) for request in requests_of(24)]
    ended = list(running.sample(requests))
    sandboxes.close()
    engine.close()
    assert {ending.request.key for ending in ended} == set(scored)
    return scored


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
