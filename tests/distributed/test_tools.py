"""Completions with calls by real engines: what is sampled, what is put between, and by whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.algorithms.types import Completion, turn_tokens
from rlmath.data.tool_fences import code_in
from rlmath.rollout.sampling import Key
from tests.distributed import tool_cases
from tests.distributed.rank_pool import RankPool
from tests.distributed.tool_cases import LATE, SLICES, TOOLS, Called, CalledInChat
from tests.selection import matrix
from tests.tool_models import (
    CHAT_END,
    CHAT_PIECES,
    CODES,
    EOS,
    START,
    make_chat_script_model,
    make_script_model,
    make_script_tokenizer,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def script_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_script_model(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def alone(ranks: RankPool, script_model: Path) -> Called:
    return ranks.run(1, tool_cases.called, script_model, 1)[0]


def runs(completion: Completion) -> list[tuple[bool, list[int], list[float]]]:
    """(sampled, tokens, log-probs) of the runs of a completion."""
    parts = []
    start = 0
    for segment in completion.segments:
        end = start + segment.tokens
        tokens = list(completion.token_ids[start:end])
        parts.append((segment.sampled, tokens, list(completion.logprobs[start:end])))
        start = end
    return parts


def test_outputs_stand_behind_their_calls_and_are_not_sampled(alone: Called) -> None:
    tokenizer = make_script_tokenizer()
    calls = [call for completion in alone.scored.values() for call in completion.calls]
    assert {"ok", "error"} <= {call.status for call in calls}
    for completion in alone.scored.values():
        parts = runs(completion)
        unsampled = [part for part in parts if not part[0]]
        assert len(unsampled) == len(completion.calls)
        assert [part[0] for part in parts] == [number % 2 == 0 for number in range(len(parts))]
        assert all(
            segment.policy_version == 5 and segment.step == 2 for segment in completion.segments
        )
        assert completion.n_sampled == sum(len(tokens) for sampled, tokens, _ in parts if sampled)
        for call, (_, tokens, logprobs) in zip(completion.calls, unsampled, strict=True):
            shown = tokenizer.decode(tokens)
            assert shown.lstrip("\n") == f"```output\n{call.output}```\n"
            assert set(logprobs) == {0.0}
            assert call.code != CODES[0] or call.output == "42\n"


def test_the_text_that_is_scored_has_what_was_sampled_alone(alone: Called) -> None:
    """A program's output is in no text, though `\\boxed{42}` may well be printed."""
    tokenizer = make_script_tokenizer()
    for completion in alone.scored.values():
        stopped = completion.finish_reason == "stop"
        sampled = [tokens for is_sampled, tokens, _ in runs(completion) if is_sampled]
        if stopped:
            sampled[-1] = sampled[-1][:-1]
        assert completion.text.replace("\n", "") == "".join(map(tokenizer.decode, sampled)).replace(
            "\n", ""
        )
        assert "output" not in completion.text
        for call, turn in zip(completion.calls, completion.turns, strict=False):
            assert turn.endswith("\n") and f"```python\n{call.code}\n```" in turn
        assert tokenizer.decode(sampled[-1]) == completion.turns[-1] or not completion.calls


def test_an_engine_with_one_completion_waits_for_its_calls(alone: Called) -> None:
    assert alone.first.calls and alone.waiting_seconds > 0


def test_completions_end_where_tokens_or_calls_do(alone: Called) -> None:
    """Sampled tokens count, and a call beyond the most is not made."""
    beyond = 0
    for completion in alone.scored.values():
        assert len(completion.calls) <= TOOLS.max_calls and completion.n_sampled <= 30
        if completion.finish_reason == "length" and completion.n_sampled < 30:
            assert len(completion.calls) == TOOLS.max_calls
            assert code_in(completion.turns[-1]) is not None
            beyond += 1
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == 1 and turn_tokens(completion) > 1
    assert beyond
    assert {completion.finish_reason for completion in alone.scored.values()} == {"stop", "length"}


def test_log_probs_are_those_of_one_pass_over_the_whole(alone: Called) -> None:
    for key, completion in alone.completions.items():
        sampled = completion.sampled or [True] * len(completion.token_ids)
        pairs = zip(completion.logprobs, alone.again[key], sampled, strict=True)
        assert max(abs(one - other) for one, other, is_sampled in pairs if is_sampled) < 1e-4


@pytest.mark.parametrize("number", range(len(LATE)), ids=map(str, LATE))
def test_tokens_that_come_late_behind_a_call_are_dropped(alone: Called, number: int) -> None:
    assert alone.late[number] == alone.completions


@pytest.mark.parametrize("number", range(len(SLICES)), ids=map(str, SLICES))
def test_any_slices_are_the_whole(alone: Called, number: int) -> None:
    """Slices end in code, behind a call and in an answer; sessions are made again by their calls."""
    assert alone.sliced[number] == alone.completions


def test_a_rollout_that_loses_most_completions_ends_with_the_reason(alone: Called) -> None:
    assert "completions with calls are lost, as their sandbox gave no result" in alone.refusal
    assert "server has ended" in alone.refusal


def counts(completions: dict[Key, Completion]) -> set[tuple[int, str]]:
    """The calls that count their session's calls: which of the completion, and what it shows."""
    return {
        (number, call.output)
        for completion in completions.values()
        for number, call in enumerate(completion.calls, start=1)
        if call.code == CODES[2]
    }


def test_names_live_on_between_the_calls_of_a_completion(alone: Called) -> None:
    """Fewer sessions than completions are kept alive: others are made again by earlier calls."""
    assert TOOLS.sessions < len(alone.completions)
    assert counts(alone.completions) == {(1, "1\n"), (2, "2\n"), (3, "3\n")}


def test_calls_know_nothing_of_each_other_where_each_begins_fresh(alone: Called) -> None:
    assert counts(alone.fresh) == {(1, "1\n"), (2, "1\n"), (3, "1\n")}
    for key, completion in alone.fresh.items():
        other = alone.completions[key]
        assert [call.code for call in completion.calls] == [call.code for call in other.calls]


@matrix
def test_two_ranks_of_an_engine_stay_in_step(
    ranks: RankPool, script_model: Path, alone: Called
) -> None:
    """Results come late, in any order; both ranks go on with them at the same steps."""
    first, second = ranks.run(2, tool_cases.called, script_model, 2)
    assert_in_step(first, second, alone)


def assert_in_step(
    first: Called | CalledInChat, second: Called | CalledInChat, alone: Called | CalledInChat
) -> None:
    """Both ranks have the same completions, those of an engine of one rank; one has their texts."""
    assert tokens_of(first.completions) == tokens_of(second.completions)
    for key, completion in second.completions.items():
        assert completion == replace(first.completions[key], text="")
    assert not second.scored and set(first.scored) == set(first.completions)
    assert tokens_of(first.completions) == tokens_of(alone.completions)
    for one_rank, of_two in zip(alone.sliced, first.sliced, strict=True):
        assert tokens_of(of_two) == tokens_of(one_rank)


def tokens_of(completions: dict[Key, Completion]) -> dict[Key, list[int]]:
    return {key: list(completion.token_ids) for key, completion in completions.items()}


def test_the_scored_completion_is_the_one_that_is_returned(alone: Called) -> None:
    assert alone.scored.keys() == alone.completions.keys()
    for key, completion in alone.scored.items():
        assert alone.completions[key] == replace(completion, text=alone.completions[key].text)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_script_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def alone_in_chat(ranks: RankPool, chat_model: Path) -> CalledInChat:
    return ranks.run(1, tool_cases.called_in_chat, chat_model, 1)[0]


@pytest.mark.parametrize("number", range(len(SLICES)), ids=map(str, SLICES))
def test_any_slices_of_a_chat_are_the_whole(alone_in_chat: CalledInChat, number: int) -> None:
    """Slices end in a call, between two of a turn, before and behind a turn's end."""
    assert alone_in_chat.sliced[number] == alone_in_chat.completions


@matrix
def test_two_ranks_of_an_engine_stay_in_step_in_a_chat(
    ranks: RankPool, chat_model: Path, alone_in_chat: CalledInChat
) -> None:
    first, second = ranks.run(2, tool_cases.called_in_chat, chat_model, 2)
    assert_in_step(first, second, alone_in_chat)


def test_calls_in_a_chat_end_turns_and_are_answered_together(alone_in_chat: CalledInChat) -> None:
    """What is given extends the conversation: one end of every turn, which was sampled."""
    scored = alone_in_chat.scored
    tokenizer = make_script_tokenizer(CHAT_PIECES, CHAT_END, special=(START,))
    several = 0
    outputs: set[tuple[int, str]] = set()
    for completion in scored.values():
        parts = runs(completion)
        assert [part[0] for part in parts] == [number % 2 == 0 for number in range(len(parts))]
        calls = list(completion.calls)
        for (_, turn, _), (_, given, logprobs) in zip(parts[::2], parts[1::2], strict=False):
            text = tokenizer.decode(turn)
            count = text.count("<tool_call>")
            several += count > 1
            assert turn[-1] == EOS and EOS not in turn[:-1] and count
            shown = [call.output for call in calls[:count]]
            blocks = "".join(f"\n<tool_response>\n{output}\n</tool_response>" for output in shown)
            assert tokenizer.decode(given) == (
                f"\n<|im_start|>user{blocks}<|im_end|>\n<|im_start|>assistant\n"
            )
            assert set(logprobs) == {0.0}
            assert [call.code for call in calls[:count]] == [
                part.partition('"}}')[0] for part in text.split('"code": "')[1:]
            ]
            del calls[:count]
        assert not calls and len(completion.calls) <= TOOLS.max_calls
        assert CHAT_END not in completion.text and "tool_response" not in completion.text
        assert completion.n_sampled <= 30
        outputs |= {
            (number, call.output)
            for number, call in enumerate(completion.calls, start=1)
            if call.code == CODES[2]
        }
    assert several and {completion.finish_reason for completion in scored.values()} >= {"stop"}
    assert outputs == {(1, "1\n"), (2, "2\n"), (3, "3\n")}
