"""Calls of a turn that waits: one after another, with what is shown of them together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlmath.algorithms.types import NOTHING_SAMPLED, PartialCompletion, turn_tokens
from rlmath.config.schema import ToolsConfig
from rlmath.data.tool_formats import open_format
from rlmath.data.tool_outputs import SampledCall
from rlmath.rollout.called_completions import CalledCompletions, FoundCalls
from rlmath.rollout.sampling import Request
from rlmath.sandbox.calls import CallResult, PastCall
from tests.data.tool_chat_templates import byte_tokenizer, with_tool

TOOLS = ToolsConfig(format="chat", max_calls=3, max_output_tokens=64)
TOKENIZER = with_tool(byte_tokenizer(), "qwen2.5")
FORMAT = open_format(TOKENIZER, TOOLS)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
BEHIND = "<|im_end|>\n<|im_start|>assistant\n"


def result(text: str, status: str = "ok") -> CallResult:
    return CallResult(status, text, cpu_seconds=0.5, wall_seconds=0.0, queue_seconds=0.0)


class Sandboxes:
    """Executes no code: a test gives the results, one whenever it is asked."""

    def __init__(self, results: Sequence[CallResult]) -> None:
        self._results = list(results)
        self._name = ""
        self.submitted: list[tuple[str, list[PastCall]]] = []

    def submit(self, key: str, code: str, seed: int, earlier: Sequence[PastCall]) -> None:
        assert seed == 7
        self._name = key
        self.submitted.append((code, list(earlier)))

    def wait(self, seconds: float) -> list[tuple[str, CallResult]]:
        return [(self._name, self._results.pop(0))]


def call(code: str) -> str:
    return f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{code}"}}}}\n</tool_call>'


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def request_of(token_ids: Sequence[int], so_far: PartialCompletion = NOTHING_SAMPLED) -> Request:
    """A request whose completion has these sampled tokens behind what it had."""
    longer = so_far.extended(list(token_ids), [-1.0] * len(token_ids), policy_version=2, step=1)
    request = Request((0, 0), (5,), seed=7, min_new_tokens=0, max_new_tokens=999)
    return Request(**{**vars(request), "so_far": longer})


def run(
    token_ids: Sequence[int], sandboxes: Sandboxes, so_far: PartialCompletion = NOTHING_SAMPLED
) -> tuple[CalledCompletions, Request, bool]:
    """(what answers calls, the request behind the outputs of its turn, whether it is lost)."""
    called = CalledCompletions(TOOLS, FORMAT, sandboxes)  # type: ignore[arg-type]
    found = called.find(so_far, token_ids, new_tokens=1)
    assert found is not None and found.tokens == len(token_ids)
    assert called.submit(request_of(token_ids, so_far), found.calls)
    answers = []
    while not answers:
        assert len(called) == 1
        answers = called.answered(is_idle=True)
    assert len(called) == 0
    ((answer),) = answers
    return called, answer.request, answer.is_lost


def test_all_calls_of_a_turn_run_in_order_and_are_shown_together() -> None:
    turn = f"I add.\n{call('n = 1')}\n{call('n')}"
    sandboxes = Sandboxes([result(""), result("1\n", "error")])
    called, request, is_lost = run([*ids_of(turn), END], sandboxes)
    assert not is_lost
    assert sandboxes.submitted == [("n = 1", []), ("n", [PastCall("n = 1", True, 0.5)])]
    so_far = request.so_far
    assert turn_tokens(so_far) == 0 and so_far.n_sampled == len(ids_of(turn)) + 1
    given = TOKENIZER.decode(so_far.token_ids[so_far.n_sampled :])
    assert given == (
        "\n<|im_start|>user\n<tool_response>\n\n</tool_response>\n<tool_response>\n1\n\n"
        f"</tool_response>{BEHIND}"
    )
    assert list(so_far.logprobs) == [-1.0] * so_far.n_sampled + [0.0] * len(ids_of(given))
    assert [(c.code, c.output, c.status) for c in so_far.calls] == [
        ("n = 1", "", "ok"),
        ("n", "1\n", "error"),
    ]
    assert all(c.ends_turn and c.position == len(turn) + 1 for c in so_far.calls)

    sandboxes = Sandboxes([result("2\n")])
    _, request, _ = run([*ids_of(call("n + 1")), END], sandboxes, so_far)
    ((_, earlier),) = sandboxes.submitted
    assert [past.code for past in earlier] == ["n = 1", "n"]
    whole = request_of([*ids_of("So \\boxed{2}"), END], request.so_far).so_far
    text = called.text_of(whole, stopped=True)
    completion = whole.finished(0, text, "stop")
    assert completion.text == f"{turn}\n{call('n + 1')}\nSo \\boxed{{2}}"
    assert completion.turns == [f"{turn}\n", "", f"{call('n + 1')}\n", "So \\boxed{2}"]
    assert completion.answer_text == "So \\boxed{2}"


def test_a_turn_with_more_calls_than_are_left_runs_none() -> None:
    _, request, _ = run([*ids_of(call("1") * 2), END], Sandboxes([result("1\n")] * 2))
    called = CalledCompletions(TOOLS, FORMAT, Sandboxes([]))  # type: ignore[arg-type]
    for count, runs in ((2, False), (1, True)):
        token_ids = [*ids_of(call("2") * count), END]
        found = called.find(request.so_far, token_ids, new_tokens=len(token_ids))
        assert found == FoundCalls(len(token_ids), (SampledCall("2"),) * count)
        assert called.submit(request_of(token_ids, request.so_far), found.calls) == runs


def test_only_a_completion_at_the_end_of_its_calls_has_unanswered_ones() -> None:
    turn = [*ids_of(call("1") * 2), END]
    called, request, _ = run(turn, Sandboxes([result("1\n")] * 2))
    expected = FoundCalls(len(turn), (SampledCall("1"),) * 2)
    assert called.unanswered(request_of(turn).so_far) == expected
    assert called.unanswered(request.so_far) is None, "its outputs are there"
    next_turn = [*ids_of(call("2")), END]
    more = request_of(next_turn, request.so_far)
    assert called.unanswered(more.so_far) == FoundCalls(len(next_turn), (SampledCall("2"),))
    for token_ids in ([], turn[:-1], [*ids_of("So 1"), END], [*turn, 5]):
        assert called.unanswered(request_of(token_ids).so_far) is None


def test_a_call_that_is_lost_ends_its_turn() -> None:
    sandboxes = Sandboxes([result("1\n"), result("killed", "lost"), result("3\n")])
    _, request, is_lost = run([*ids_of(call("1") + call("2") + call("3")), END], sandboxes)
    assert is_lost and len(sandboxes.submitted) == 2
    assert [c.status for c in request.so_far.calls] == ["ok", "lost"]
    assert request.so_far.calls[-1].output == "killed"
    assert turn_tokens(request.so_far) == request.so_far.n_sampled


@pytest.mark.parametrize(
    ("turn", "is_call"),
    [
        (call("1"), True),
        (f"{call('1')} and {call('2')[:-9]}", False),
        (f"<think>{call('1')}", False),
        ("So \\boxed{2}", False),
    ],
)
def test_what_is_no_call_ends_the_completion(turn: str, is_call: bool) -> None:
    called = CalledCompletions(TOOLS, FORMAT, Sandboxes([]))  # type: ignore[arg-type]
    token_ids = [*ids_of(turn), END]
    found = called.find(NOTHING_SAMPLED, token_ids, new_tokens=3)
    assert (found is not None) == is_call
    assert called.find(NOTHING_SAMPLED, token_ids[:-1], new_tokens=3) is None
