"""The unfinished groups of partial rollouts in a checkpoint: safetensors with JSON inside.

    tokens, logprobs   of all completions, one behind the other, in the order of groups and samples
    header             {"version", "next_draw", "short_share", "groups": [...]}, of every group {"draw", "first_step",
                       "deferred", "samples": [...]}, and of every sample {"segments"}, with {"finish_reason", "text",
                       "score"} where it is finished, {"calls"} where it has called a tool or was given feedback,
                       {"figures"} where an environment returned some, and {"routes"}, the places
                       of its experts, [rank, number, tokens] (`checkpoint.route_files`), where it has some; a segment
                       is [tokens, version, step], with a fourth number, 0, where its tokens were not sampled

Earlier versions wrote no texts, which then follow from the tokens. The manifest has its checksum; a reader looks at
what a run with other settings may have written.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlmath.algorithms.partial_rollouts import UnfinishedGroup, UnfinishedGroups
from rlmath.algorithms.types import (
    FEEDBACK,
    NOTHING_SAMPLED,
    PartialCompletion,
    RewardFailure,
    RoutesAt,
    Score,
    ScoredCompletion,
    Segment,
    ToolCall,
)
from rlmath.answers.verifier import FAILURES, VERDICTS
from rlmath.sandbox.calls import STATUSES

UNFINISHED = "flight.safetensors"
"""Checkpoints keep the name that earlier versions gave the file."""
VERSION = 1
TOKEN_BYTES = 8
"""Size of a sampled token in file and memory: its number (int32) and its log-prob (float32)."""


def write_unfinished(unfinished: UnfinishedGroups) -> bytes:
    """The file's contents."""
    token_ids = array("i")
    logprobs = array("f")
    groups = []
    for group in unfinished.groups:
        samples: list[dict[str, Any]] = []
        for sample, part in zip(group.samples, group.parts, strict=True):
            token_ids.extend(part.token_ids)
            logprobs.extend(part.logprobs)
            row: dict[str, Any] = {"segments": segment_rows(part.segments)}
            if part.routes_at:
                row["routes"] = place_rows(part.routes_at)
            if part.calls:
                row["calls"] = [asdict(call) for call in part.calls]
            if part.figures:
                row["figures"] = list(part.figures)
            if isinstance(sample, ScoredCompletion):
                row |= {
                    "finish_reason": sample.completion.finish_reason,
                    "text": sample.completion.text,
                    "score": asdict(sample.score),
                }
            samples.append(row)
        row = {"draw": group.draw, "first_step": group.first_step, "deferred": group.deferred}
        groups.append(row | {"samples": samples})
    numbers = {
        "version": VERSION,
        "next_draw": unfinished.next_draw,
        "short_share": unfinished.short_share,
    }
    header = json.dumps(numbers | {"groups": groups}).encode()
    return save(
        {
            "header": np.frombuffer(header, np.uint8),
            "tokens": np.frombuffer(token_ids, np.int32),
            "logprobs": np.frombuffer(logprobs, np.float32),
        }
    )


def read_unfinished(
    content: bytes, group_size: int, vocab_size: int, text_of: Callable[[Sequence[int], bool], str]
) -> UnfinishedGroups:
    """Read the groups in flight; ValueError if the file is none of ours.

    They have `group_size` completions of tokens below `vocab_size`; `text_of` decodes the tokens of
    a finished completion that an earlier version wrote."""
    try:
        tensors = load(content)
        header = json.loads(tensors["header"].tobytes())
        if header["version"] != VERSION:
            raise ValueError(f"its form is version {header['version']!r}; needed: {VERSION}")
        tokens = tensors["tokens"]
        reader = TokenReader(tokens, tensors["logprobs"])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"tokens are not below {vocab_size}")
        groups = [_read_group(row, reader, text_of) for row in header["groups"]]
        wrong = [len(group.samples) for group in groups if len(group.samples) != group_size]
        if wrong:
            raise ValueError(f"a group has {wrong[0]} completions, and not {group_size}")
        reader.check_end()
        return UnfinishedGroups(
            groups, read_count(header["next_draw"]), float(header["short_share"])
        )
    except (SafetensorError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{UNFINISHED} is damaged ({type(error).__name__}: {error})") from error


def route_file(rank: int) -> str:
    """Name of the file of a rank's routes (`checkpoint.route_files`)."""
    return f"routes-{rank:05d}.safetensors"


def place_rows(places: Sequence[RoutesAt]) -> list[list[int]]:
    """The places of slices' experts as JSON."""
    return [[place.rank, place.number, place.tokens] for place in places]


def read_place(place: Any) -> RoutesAt:
    """The place of a slice's experts from its row; ValueError or TypeError where it is none."""
    rank, number, tokens = map(read_count, place)
    return RoutesAt(rank, number, tokens)


def _read_group(
    row: dict[str, Any], reader: TokenReader, text_of: Callable[[Sequence[int], bool], str]
) -> UnfinishedGroup:
    """A group from its JSON and the next of the tokens."""
    samples = []
    for index, sample_row in enumerate(row["samples"]):
        segments = read_segments(sample_row)
        token_ids, logprobs = reader.read(sum(segment.tokens for segment in segments))
        calls = tuple(read_call(call_row) for call_row in sample_row.get("calls", ()))
        part = NOTHING_SAMPLED
        if segments:
            places = tuple(read_place(place) for place in sample_row.get("routes", ()))
            part = PartialCompletion(
                token_ids,
                logprobs,
                segments,
                calls=calls,
                figures=read_figures(sample_row),
                routes_at=places,
            )
        if sample_row.get("score") is None:
            samples.append(part)
        else:
            if "text" in sample_row:
                text = read_text(sample_row["text"])
            else:  # as earlier versions wrote it
                text = text_of(token_ids, sample_row["finish_reason"] == "stop")
            completion = part.finished(index, text, sample_row["finish_reason"])
            samples.append(ScoredCompletion(completion, read_score(sample_row["score"])))
    return UnfinishedGroup(
        read_count(row["draw"]),
        read_count(row["first_step"]),
        tuple(samples),
        deferred=bool(row["deferred"]),
    )


class TokenReader:
    """Reads the tokens of completions that lie one behind the other, with their log-probs."""

    def __init__(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        if (tokens.dtype, logprobs.dtype) != (
            np.int32,
            np.float32,
        ) or tokens.shape != logprobs.shape:
            raise ValueError("tokens or log-probs have another form")
        if tokens.ndim != 1:
            raise ValueError("tokens are not in one row")
        self._tokens = tokens
        self._logprobs = logprobs
        self._end = 0

    def read(self, count: int) -> tuple[array[int], array[float]]:
        """The next `count` tokens and log-probs."""
        start, self._end = self._end, self._end + count
        if self._end > len(self._tokens):
            raise ValueError("tokens are missing")
        token_ids = array("i")
        logprobs = array("f")
        token_ids.frombytes(self._tokens[start : self._end].tobytes())
        logprobs.frombytes(self._logprobs[start : self._end].tobytes())
        return token_ids, logprobs

    def check_end(self) -> None:
        if self._end != len(self._tokens):
            raise ValueError("there are too many tokens")


def segment_rows(segments: Sequence[Segment]) -> list[list[int]]:
    """The segments of a completion as JSON.

    >>> segment_rows([Segment(5, 2, 1), Segment(3, 2, 1, sampled=False)])
    [[5, 2, 1], [3, 2, 1, 0]]
    """
    return [
        [segment.tokens, segment.policy_version, segment.step, *([] if segment.sampled else [0])]
        for segment in segments
    ]


def read_segments(row: dict[str, Any]) -> tuple[Segment, ...]:
    """The segments of a completion's row; each has tokens."""
    segments = tuple(_read_segment(*map(read_count, segment)) for segment in row["segments"])
    if any(segment.tokens == 0 for segment in segments):
        raise ValueError("tokens are missing")
    return segments


def _read_segment(tokens: int, policy_version: int, step: int, sampled: int = 1) -> Segment:
    return Segment(tokens, policy_version, step, sampled=bool(sampled))


def read_call(row: dict[str, Any]) -> ToolCall:
    """A call of a tool from the JSON that `asdict` made of it.

    ValueError, KeyError or TypeError where it is none."""
    read_text(row["code"])
    read_text(row["output"])
    read_count(row["position"])
    if row["status"] not in (*STATUSES, FEEDBACK):
        raise ValueError(f"{row['status']!r} is no status of a call")
    if not all(0 <= float(row[name]) < math.inf for name in ("seconds", "cpu_seconds")):
        raise ValueError("a call's seconds are negative or not finite")
    return ToolCall(**row)


def read_figures(row: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    """The figures of a completion's row; ValueError where one is none."""
    figures = tuple((read_text(name), float(value)) for name, value in row.get("figures", ()))
    if not all(math.isfinite(value) for _, value in figures):
        raise ValueError("a figure is not finite")
    return figures


def read_text(value: Any) -> str:
    """A text; ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


DECIDED = tuple(kind for kind in VERDICTS if kind not in (*FAILURES, "function"))
"""Verdicts that only the verifier gives."""


def read_score(row: dict[str, Any]) -> Score:
    """A score from the JSON that `asdict` made of it.

    ValueError, KeyError or TypeError where it is none."""
    row = {"parts": [], "failures": []} | row  # those of before there were several rewards
    if "verified_correct" not in row:  # those of before accuracy was the verifier's
        row |= {"verified_correct": row["correct"] if row["verdict"] in DECIDED else None}
    metrics = tuple((str(name), float(value)) for name, value in row["metrics"])
    failures = tuple(RewardFailure(**failure_row) for failure_row in row["failures"])
    score = Score(**row | {"metrics": metrics, "parts": tuple(row["parts"]), "failures": failures})
    numbers = (
        score.reward,
        *(value for _, value in metrics),
        *(part for part in score.parts if part is not None),
    )
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a score is not finite")
    return score


def read_count(value: Any) -> int:
    """A whole number from 0 on; ValueError for anything else."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
