"""What vLLM's engine core is told while completions are sampled, interrupted and call a tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import NOTHING_SAMPLED, Completion, PartialCompletion, Prompt, RoutesAt
from rlmath.config.schema import RolloutConfig, ToolsConfig
from rlmath.data.tool_chats import ChatFormat
from rlmath.data.tool_formats import ends_with_call, has_void_turn, open_format
from rlmath.rollout.called_completions import CalledCompletions, SharedResults
from rlmath.rollout.engine import prepare_environment
from rlmath.rollout.sampling import Key, Request
from rlmath.sandbox.calls import CallResult
from tests.data.chat_templates import chat_tokenizer
from tests.data.tool_chat_templates import byte_tokenizer, with_tool
from tests.rollout.core_queue import CoreQueue

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from rlmath.rollout.running_completions import Load, RunningCompletions  # noqa: E402

TOKENIZER = chat_tokenizer("qwen3")
CALL_IDS = TOKENIZER("```python\n1\n```", add_special_tokens=False)["input_ids"]
(NEWLINE,) = TOKENIZER("\n", add_special_tokens=False)["input_ids"]
END = [TOKENIZER.eos_token_id]
TOOLS = ToolsConfig(format="fence")
CALL = '{"name": "python", "arguments": {"code": "1"}, "id": "aB3456789"}'
FORMAT = open_format(TOKENIZER, TOOLS)


class Core(CoreQueue):
    """An engine core of vLLM that runs no model: a test says what it samples."""

    def __init__(self, *steps: dict[int, list[int]], places: int = 9) -> None:
        """Each step gives tokens to requests by their seeds; an end ends them."""
        super().__init__(places)
        self._steps = iter(steps)
        self.begun: list[int] = []
        """Seeds, in order."""
        self.aborted: list[list[str]] = []
        self.engine_core = SimpleNamespace(scheduler=self)

    def add_request(self, core_request: Any) -> None:
        self._add(core_request)

    def abort_requests(self, names: list[str]) -> None:
        self.aborted.append(names)
        super().abort_requests(names)

    def get_output(self) -> Any:
        begun = self._begin_waiting()
        self.begun += [core_request.sampling_params.seed for core_request in begun]
        tokens = next(self._steps)
        outputs = []
        for core_request in list(self._running):
            token_ids = tokens[core_request.sampling_params.seed]
            is_end = token_ids == END
            if is_end:
                self._remove(core_request)
            outputs.append(
                SimpleNamespace(
                    request_id=core_request.request_id,
                    new_token_ids=token_ids,
                    new_logprobs=[-1.0] * len(token_ids),
                    finish_reason="stop" if is_end else None,
                )
            )
        return SimpleNamespace(outputs=outputs)


def running_of(
    core: Core,
    tools: CalledCompletions | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    routes_of: Callable[[str, int, int], torch.Tensor] | None = None,
) -> RunningCompletions:
    def process_inputs(name: str, prompt: Any, parameters: Any, **options: Any) -> Any:
        return SimpleNamespace(request_id=name, sampling_params=parameters, prompt=prompt)

    engine = SimpleNamespace(
        engine_core=core,
        input_processor=SimpleNamespace(process_inputs=process_inputs),
        get_supported_tasks=lambda: (),
        vllm_config=SimpleNamespace(lora_config=None),
    )
    return RunningCompletions(
        SimpleNamespace(llm_engine=engine),
        RolloutConfig(),
        tokenizer=tokenizer,
        tools=tools,
        routes_of=routes_of,
    )


def request(number: int) -> Request:
    return Request((number, 0), (5,), number, min_new_tokens=0, max_new_tokens=99)


def tools_of(*numbers: int, settings: ToolsConfig = TOOLS, status: str = "ok") -> CalledCompletions:
    """Calls are answered in this order, one whenever results are shared."""
    outcomes = iter(numbers)

    def share(results: SharedResults) -> SharedResults:
        outcome = CallResult(status, "1\n", cpu_seconds=0.0, wall_seconds=0.0, queue_seconds=0.0)
        return [(f"{number}/0", outcome) for number in [next(outcomes)]]

    return CalledCompletions(settings, FORMAT, sandboxes=None, share=share)


def test_requests_leave_vllm_one_by_one_so_that_all_ranks_free_blocks_in_one_order() -> None:
    """vLLM frees the blocks of several in the order of a set, which differs between processes."""
    core = Core({0: CALL_IDS, 1: CALL_IDS, 2: CALL_IDS})
    running = running_of(core, tools_of())
    for number in range(3):
        running.begin(request(number))
    names = list(core.requests)
    running.step()
    assert core.aborted == [[name] for name in names]

    core = Core()
    running = running_of(core)
    for number in range(3):
        running.begin(request(number))
    names = list(core.requests)
    with running.interrupted():
        assert core.aborted == [[name] for name in names]


class OneByOne:
    """Gives requests one after the other, while none waits."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)
        self.lengths: dict[Key, int] = {}

    def pop(self, load: Load) -> list[Request]:
        return [self._requests.pop(0)] if self._requests and not load.waiting else []

    def ended(self, key: Key, tokens: int) -> None:
        self.lengths[key] = tokens


def test_new_work_begins_while_a_completion_waits_for_its_call() -> None:
    """Lengths are those of what was sampled."""
    core = Core({0: CALL_IDS}, {1: END}, {0: END})
    source = OneByOne([request(0), request(1)])
    ended = list(running_of(core, tools_of(0)).sample(source))
    assert core.begun == [0, 1, 0] and len(ended) == 2
    assert source.lengths == {(0, 0): len(CALL_IDS) + 1, (1, 0): 1}


def test_a_resumed_completion_goes_before_those_that_wait() -> None:
    more = {1: [5]}
    core = Core({0: CALL_IDS}, more, more, more, {1: END}, {0: END}, {2: END}, places=1)
    list(running_of(core, tools_of(0)).sample([request(0), request(1), request(2)]))
    assert core.begun == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("name", "turn", "most_tokens"),
    [
        ("mistral", f"[TOOL_CALLS][{', '.join([CALL, CALL])}]", 999),
        ("mistral", f"[TOOL_CALLS][{CALL}]", None),
        ("llama3", CALL.replace("arguments", "parameters"), None),
        ("qwen2.5", f"<tool_call>{CALL}</tool_call>", None),
    ],
)
def test_a_first_turn_with_calls_that_are_not_run_is_no_void_turn(
    name: str, turn: str, most_tokens: int | None
) -> None:
    """Too many calls, or no token left: its text has no end, as that of other turns with calls."""
    tokenizer = with_tool(byte_tokenizer(), name)
    tools = ToolsConfig(format="chat", max_calls=1)
    tool_format = open_format(tokenizer, tools)
    assert isinstance(tool_format, ChatFormat)
    token_ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
    turn_ids = [*token_ids, tool_format.frame.end_id]
    called = CalledCompletions(tools, tool_format, sandboxes=None)
    running = running_of(Core({0: turn_ids}), called, tokenizer)
    asked = replace(request(0), max_new_tokens=most_tokens or len(turn_ids))
    (ended,) = running.sample([asked])
    completion = ended.completion
    assert isinstance(completion, Completion)
    assert completion.text == turn and completion.finish_reason == "length"
    assert list(completion.token_ids) == turn_ids
    prompt = Prompt("q", "1+1?", (5,), solutions=("2",), task="math")
    assert ends_with_call(prompt, completion, tools)
    assert not has_void_turn(prompt, completion, "boxed", tools)


@pytest.mark.parametrize(("so_far", "expected"), [(0, [0, 1, 2]), (1, [3]), (4, [6])])
def test_routes_are_those_of_the_tokens_that_new_ones_were_sampled_by(
    so_far: int, expected: list[int]
) -> None:
    """A prompt has three tokens, beside what is sampled so far and one new token.

    Those before the last of them have been read before, perhaps by other weights."""

    def routes_of(name: str, first: int, end: int) -> torch.Tensor:
        return torch.arange(first, end)

    part = NOTHING_SAMPLED
    if so_far:
        part = part.extended((7,) * so_far, (-1.0,) * so_far, policy_version=0, step=0)
        part = replace(part, routes_at=(RoutesAt(0, 0, tokens=3 + so_far - 1),))
    running = running_of(Core({0: END}), routes_of=routes_of)
    begun = replace(request(0), token_ids=(5, 5, 5), so_far=part)
    (ended,) = running.sample([begun])
    assert ended.routes is not None
    assert ended.routes.tolist() == expected


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize("ends_slice", [False, True])
def test_a_completion_that_calls_has_routes_of_all_turns_and_of_what_the_engine_reads_again(
    ends_slice: bool, earlier: int
) -> None:
    """The last token of the call, its output, and what follows but the very last token are read.

    `earlier` tokens are of a slice before; where the call `ends_slice`, a further slice goes on."""
    asked: list[tuple[int, int]] = []

    def routes_of(name: str, first: int, end: int) -> torch.Tensor:
        asked.append((first, end))
        return torch.arange(first, end)

    part = NOTHING_SAMPLED
    if earlier:
        part = part.extended((NEWLINE,) * earlier, (-1.0,) * earlier, policy_version=0, step=0)
        part = replace(part, routes_at=(RoutesAt(0, 0, tokens=earlier),))
    core = Core({0: [*CALL_IDS, 9]}, {0: END})
    running = running_of(core, tools_of(0), routes_of=routes_of)
    tokens_now = len(CALL_IDS) if ends_slice else 50
    (ended,) = running.sample([replace(request(0), so_far=part, slice_tokens=tokens_now)])
    called = 1 + earlier + len(CALL_IDS) - 1
    assert ended.routes is not None
    routes = ended.routes.tolist()
    if ends_slice:
        assert isinstance(ended.completion, PartialCompletion) and routes[-1] == called - 1
        more = replace(ended.completion, routes_at=(RoutesAt(0, 1, tokens=called),))
        (ended,) = running.sample([replace(request(0), so_far=more)])
        assert ended.routes is not None
        routes += ended.routes.tolist()
    length = 1 + len(ended.completion.token_ids)
    assert asked == [(earlier, called), (called, length - 1)]
    assert length > called + 3 and routes == list(range(earlier, length - 1))


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_completion_that_ends_with_a_call_has_its_routes_and_leaves_none(is_lost: bool) -> None:
    """It is lost, or calls once more than it may; its prompt has one token, the last has no route."""

    def routes_of(name: str, first: int, end: int) -> torch.Tensor:
        return torch.arange(first, end)

    settings = replace(TOOLS, max_calls=1)
    tools = tools_of(0, settings=settings, status="lost" if is_lost else "ok")
    running = running_of(Core({0: CALL_IDS}, {0: CALL_IDS}), tools, routes_of=routes_of)
    (ended,) = running.sample([request(0)])
    assert isinstance(ended.completion, Completion)
    assert ended.completion.finish_reason == ("lost" if is_lost else "length")
    assert len(ended.completion.calls) == 1
    assert ended.routes is not None
    assert ended.routes.tolist() == list(range(len(ended.completion.token_ids)))
    assert not running._routes
