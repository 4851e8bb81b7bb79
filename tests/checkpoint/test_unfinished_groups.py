"""The groups in flight, written to a checkpoint and read back; the file may be anybody's."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from rlmath.algorithms.partial_rollouts import UnfinishedGroup, UnfinishedGroups
from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    Completion,
    PartialCompletion,
    RewardFailure,
    RoutesAt,
    Score,
    ScoredCompletion,
    Segment,
    ToolCall,
)
from rlmath.checkpoint.unfinished_groups import (
    TOKEN_BYTES,
    read_score,
    read_unfinished,
    write_unfinished,
)

SEGMENTS = (Segment(2, 4, 1), Segment(1, 5, 2))


def text_of(token_ids: Sequence[int], stopped: bool = False) -> str:
    return " ".join(map(str, token_ids[:-1] if stopped else token_ids))


def partial(*token_ids: int) -> PartialCompletion:
    return PartialCompletion(array("i", token_ids), array("f", [-0.1] * 3), SEGMENTS)


def finished(*token_ids: int, score: Score) -> ScoredCompletion:
    logprobs = array("f", [-0.25, -1e-7, -30.0])
    return ScoredCompletion(
        Completion(1, array("i", token_ids), logprobs, text_of(token_ids), "length", 5, SEGMENTS),
        score,
    )


UNFINISHED = UnfinishedGroups(
    [
        UnfinishedGroup(
            7,
            1,
            (
                partial(3, 4, 5),
                finished(
                    6,
                    7,
                    99,
                    score=Score(-0.5, False, "\ud800x", "error", True, (("n", 2.5),), 0.25),
                ),
            ),
        ),
        UnfinishedGroup(9, 2, (NOTHING_SAMPLED, NOTHING_SAMPLED), deferred=True),
    ],
    next_draw=12,
    short_share=1 / 3,
)


def test_a_token_in_flight_takes_eight_bytes() -> None:
    groups = [
        UnfinishedGroup(
            draw, 0, (PartialCompletion([5] * 1000, [-1.0] * 1000, (Segment(1000, 0, 0),)),) * 2
        )
        for draw in (0, 1)
    ]
    bytes_of_one, bytes_of_two = (
        len(write_unfinished(UnfinishedGroups(groups[:count], 2))) for count in (1, 2)
    )
    assert 0 < bytes_of_two - bytes_of_one - 2 * 1000 * TOKEN_BYTES < 2 * 200, (
        "beside the header's 200 bytes a completion"
    )


def test_what_is_read_is_what_was_written() -> None:
    read_back = read_unfinished(write_unfinished(UNFINISHED), 2, 100, text_of)
    assert (read_back.next_draw, read_back.short_share) == (12, 1 / 3)
    assert [(group.draw, group.first_step, group.deferred) for group in read_back.groups] == [
        (7, 1, False),
        (9, 2, True),
    ]
    first, second = read_back.groups
    assert first.samples == UNFINISHED.groups[0].samples
    assert second.samples == (NOTHING_SAMPLED, NOTHING_SAMPLED) and second.unfinished == [0, 1]
    assert isinstance(first.samples[1], ScoredCompletion)
    assert first.samples[1].score.queue_seconds == 0.25


def test_the_places_of_routes_come_back() -> None:
    places = (RoutesAt(0, 4, tokens=7), RoutesAt(1, 2, tokens=3))
    part = replace(NOTHING_SAMPLED.extended((5,), (-1.0,), 0, step=0), routes_at=places)
    finished = ScoredCompletion(part.finished(1, "x", "stop"), Score(1.0, True, "x", "string"))
    groups = UnfinishedGroups([UnfinishedGroup(0, 0, (part, finished))], 1)
    (group,) = read_unfinished(write_unfinished(groups), 2, 100, text_of).groups
    assert [sample.routes_at for sample in group.parts] == [places, places]


def test_tokens_that_others_wrote_come_back_as_such() -> None:
    spans = (Segment(2, 4, 1), Segment(1, 4, 1, sampled=False))
    part = replace(partial(3, 4, 5), segments=spans)
    unfinished = UnfinishedGroups([UnfinishedGroup(0, 0, (part, NOTHING_SAMPLED))], 1)
    read_back = read_unfinished(write_unfinished(unfinished), 2, 100, text_of)
    assert read_back.groups[0].samples[0].segments == spans


CALL = ToolCall(
    "6*7", "42\n", "ok", position=9, seconds=0.5, cpu_seconds=0.25, is_cut=True, ends_turn=True
)


def with_calls() -> UnfinishedGroups:
    """A group in flight whose completions have called a tool, one of them finished."""
    spans = (Segment(2, 4, 1), Segment(1, 4, 1, sampled=False))
    part = replace(partial(3, 4, 5), segments=spans, calls=(CALL,))
    score = Score(1.0, True, "", "string", True)
    answered = finished(6, 7, 8, score=score)
    completion = replace(answered.completion, text="a call, an answer", calls=(CALL, CALL))
    samples = (part, ScoredCompletion(completion, score))
    return UnfinishedGroups([UnfinishedGroup(0, 0, samples)], 1)


def test_calls_come_back_and_the_text_in_which_they_have_their_places() -> None:
    read_back = read_unfinished(write_unfinished(with_calls()), 2, 100, text_of)
    assert read_back == with_calls()
    for sample, original in zip(
        read_back.groups[0].parts, with_calls().groups[0].parts, strict=True
    ):
        seconds = [(call.seconds, call.cpu_seconds) for call in sample.calls]
        assert seconds == [(0.5, 0.25)] * len(original.calls)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"status": "fine"}, "'fine' is no status of a call"),
        ({"code": 7}, "7 is no text"),
        ({"position": -1}, "-1 is no count"),
        ({"cpu_seconds": float("nan")}, "negative or not finite"),
        ({"cpu_seconds": -1.0}, "negative or not finite"),
        ({"seconds": 10**400}, "OverflowError"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_no_call_is_refused(changes: dict[str, object], told: str) -> None:
    call = asdict(CALL) | changes
    with pytest.raises(ValueError, match=told):
        read_unfinished(one(calls=[call]), 2, 100, text_of)


def test_log_probs_that_are_not_finite_come_back() -> None:
    """A run discards the minibatch that they are in; its checkpoint stays loadable."""
    odd = PartialCompletion(array("i", [1]), array("f", [float("-inf")]), (Segment(1, 0, 0),))
    unfinished = UnfinishedGroups([UnfinishedGroup(0, 0, (odd, NOTHING_SAMPLED))], 1)
    assert read_unfinished(write_unfinished(unfinished), 2, 100, text_of) == unfinished


def test_an_empty_flight_keeps_its_place() -> None:
    assert read_unfinished(
        write_unfinished(UnfinishedGroups([], 5)), 2, 100, text_of
    ) == UnfinishedGroups([], 5)


def damaged(**changes: object) -> bytes:
    """The file with other entries in its header."""
    tensors = dict(load(write_unfinished(UNFINISHED)))
    header = json.loads(tensors["header"].tobytes())
    header |= {name: change for name, change in changes.items() if name not in tensors}
    tensors["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return save(tensors | {name: change for name, change in changes.items() if name in tensors})


ROW = {
    "draw": 7,
    "first_step": 1,
    "deferred": False,
    "samples": [{"segments": [[5, 0, 0]]}, {"segments": [[1, 0, 0]]}],
}


def one(**changes: object) -> bytes:
    """The file with one group, whose second completion is changed."""
    first, second = ROW["samples"]
    return damaged(groups=[ROW | {"samples": [first, second | changes]}])


SCORE = {
    "reward": 1.0,
    "correct": True,
    "extracted": "",
    "verdict": "string",
    "boxed": True,
    "metrics": [],
    "queue_seconds": 0.0,
}
TOKENS = np.array([1, 2, 3, 4, 5, 99], np.int32)
LOGPROBS = np.full(6, -1.0, np.float32)


def test_the_file_of_these_tests_is_a_good_one() -> None:
    read_back = read_unfinished(one(finish_reason="stop", score=SCORE), 2, 100, text_of)
    assert read_back.groups[0].unfinished == [0]
    for reason, text in (("stop", ""), ("length", "99")):  # a file without texts
        unfinished = read_unfinished(one(finish_reason=reason, score=SCORE), 2, 100, text_of)
        assert unfinished.groups[0].parts[1].text == text
    assert (
        len(read_unfinished(damaged(tokens=TOKENS, logprobs=LOGPROBS), 2, 100, text_of).groups) == 2
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        write_unfinished(UNFINISHED)[:-20],
        damaged(groups=5),
        damaged(next_draw="12"),
        damaged(version=2),
        damaged(groups=[]),
        damaged(groups=[ROW | {"samples": ROW["samples"][:1]}]),
        one(segments=[[10**9, 0, 0]]),
        one(segments=[[1, 0]]),
        one(finish_reason="stop", score={}),
        one(finish_reason="stop", score=SCORE | {"reward": float("nan")}),
        damaged(tokens=TOKENS.astype(np.int64)),
        damaged(tokens=np.array([1, 2, 3, 4, 5, 100], np.int32)),
        damaged(logprobs=LOGPROBS[:5]),
    ],
)
def test_any_other_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"flight.safetensors is damaged \("):
        read_unfinished(content, 2, 100, text_of)


SEVERAL = Score(
    1.5,
    True,
    "2",
    "string",
    True,
    (("own/steps", 2.0),),
    0.25,
    (1.0, None, 0.5),
    (RewardFailure("own", "error", "KeyError: 'x'\n\ud800"),),
)


def test_several_rewards_are_kept_with_those_that_failed() -> None:
    unfinished = UnfinishedGroups(
        [UnfinishedGroup(7, 1, (partial(3, 4, 5), finished(6, 7, 99, score=SEVERAL)))], next_draw=8
    )
    read_back = read_unfinished(write_unfinished(unfinished), 2, 100, text_of)
    assert read_back == unfinished
    (sample,) = [
        sample for sample in read_back.groups[0].samples if isinstance(sample, ScoredCompletion)
    ]
    assert sample.score == SEVERAL


def _edited(change: Callable[[dict], None]) -> bytes:
    """The file with another score."""
    tensors = load(write_unfinished(UNFINISHED))
    header = json.loads(tensors["header"].tobytes())
    change(header["groups"][0]["samples"][1]["score"])
    return save(tensors | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)})


@pytest.mark.parametrize(
    ("verdict", "verified"), [("string", True), ("function", None), ("timeout", None)]
)
def test_a_score_of_before_accuracy_was_the_verifiers_is_read(
    verdict: str, verified: bool | None
) -> None:
    score = asdict(Score(1.0, True, "7", verdict))
    del score["verified_correct"]
    assert read_score(score).verified_correct is verified


def test_a_file_of_before_there_were_several_rewards_is_read() -> None:
    def older(score: dict) -> None:
        del score["parts"], score["failures"]

    assert read_unfinished(_edited(older), 2, 100, text_of) == UNFINISHED
