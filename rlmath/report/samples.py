"""Some sampled groups of a run.

Whatever a file holds becomes bounded text that can be shown, a number or nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.config.run_files import SAMPLES_FOLDER
from rlmath.config.terminal import visible
from rlmath.telemetry.samples import call_facts, read_samples, sample_files, text_with_outputs

MOST_FAILURE_FILES = 5
SHOWN_STEPS = 30
SHOWN_GROUPS = 3
SHOWN_COMPLETIONS = 16
FIRST_PARTS = 16
LAST_PARTS = 17
"""Limits of the page: steps of all runs, groups of a step, completions of a group, and parts of a
completion, which are sampled texts and outputs; the answer is in the last."""
HEAD_CHARS = 2000
TAIL_CHARS = 1000
"""Characters of the head and the tail of a longer completion, whose answer is at its end."""
SHORT_CHARS = 300


def samples_of(
    folder: Path, notes: list[str], most_steps: int = SHOWN_STEPS
) -> list[dict[str, Any]]:
    """Groups of a run, by rising step, as page.js reads them.

    What was left out is added to `notes`."""
    step_files = sample_files(folder)
    failures = sample_files(folder, "failure")
    damaged = 0
    shown_groups: list[dict[str, Any]] = []
    for kind, files, most_files, most_groups in (
        ("step", step_files, most_steps, SHOWN_GROUPS),
        ("failure", failures, MOST_FAILURE_FILES, 1),
    ):
        for step in _spread(list(files), most_files):
            groups, broken = _read_groups(files[step], step, kind)
            shown_groups += groups[:most_groups]
            damaged += broken
    if damaged:
        notes.append(
            f"{SAMPLES_FOLDER}/: {damaged} lines or files are no samples and were left out."
        )
    if len(step_files) > most_steps:
        notes.append(
            f"The page has samples of {most_steps} of the {len(step_files)} steps that have some, "
            "spread evenly."
        )
    return sorted(shown_groups, key=lambda group: group["step"])


def _spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` items, spread evenly, the first and the last among them.

    >>> _spread([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    if len(items) <= most:
        return list(items)
    if most <= 1:
        return list(items[-1:]) if most else []
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def _read_groups(path: Path, step: int, kind: str) -> tuple[list[dict[str, Any]], int]:
    """The groups of a file, and how many of its lines are none."""
    groups = []
    damaged = 0
    try:
        for _, row in read_samples(path):
            try:
                groups.append(_group(row, step, kind))
            except (ValueError, TypeError, KeyError, AttributeError):
                damaged += 1
    except OSError:
        damaged += 1
    return groups, damaged


def _group(row: Any, step: int, kind: str) -> dict[str, Any]:
    """A group as page.js reads it.

    ValueError, TypeError, KeyError or AttributeError for a row that is none."""
    if isinstance(row, ValueError):
        raise row
    solutions = row["solutions"] if isinstance(row.get("solutions"), list) else []
    completions = [_completion(completion) for completion in row["completions"][:256]]
    return {
        "step": step,
        "kind": kind,
        "id": text_of(row.get("prompt_id"), SHORT_CHARS),
        "prompt": text_of(row["prompt"], HEAD_CHARS, TAIL_CHARS),
        "solutions": [text_of(solution, SHORT_CHARS) for solution in solutions[:8]],
        "right": sum(completion["correct"] for completion in completions),
        "sampled": len(completions),
        "completions": completions[:SHOWN_COMPLETIONS],
    }


def _completion(completion: Any) -> dict[str, Any]:
    """A completion as page.js reads it; an error for what is none."""
    rewards = completion.get("rewards") if isinstance(completion.get("rewards"), dict) else {}
    failures = completion.get("failures") if isinstance(completion.get("failures"), dict) else {}
    return {
        "reward": number_of(completion.get("reward")),
        "advantage": number_of(completion.get("advantage")),
        "correct": completion.get("correct") is True,
        "verdict": text_of(completion.get("verdict"), 40),
        "extracted": text_of(completion.get("extracted"), SHORT_CHARS),
        "length": number_of(completion.get("length")),
        "finish": text_of(completion.get("finish_reason"), 40),
        "rewards": [
            [text_of(name, 60), number_of(value)] for name, value in list(rewards.items())[:16]
        ],
        "failures": [
            [text_of(name, 60), text_of(reason, SHORT_CHARS)]
            for name, reason in list(failures.items())[:16]
        ],
        **(
            {"parts": _parts(completion)}
            if completion.get("calls")
            else {"text": text_of(completion["text"], HEAD_CHARS, TAIL_CHARS)}
        ),
    }


def _parts(completion: dict[str, Any]) -> list[list[str]]:
    """[facts of a call, its output] and ["", sampled text], as they stand in a completion.

    The first and the last of many; together they have about the characters of a text."""
    called = text_with_outputs(completion)
    if len(called) > FIRST_PARTS + LAST_PARTS:
        left_out = len(called) - FIRST_PARTS - LAST_PARTS
        gap = (None, f"[... {left_out} parts left out ...]")
        called = [*called[:FIRST_PARTS], gap, *called[-LAST_PARTS:]]
    head = max(SHORT_CHARS, HEAD_CHARS // len(called))
    tail = max(SHORT_CHARS, TAIL_CHARS // len(called))
    parts = []
    for call, text in called:
        facts = "" if call is None else text_of(call_facts(call), SHORT_CHARS)
        parts.append([facts, text_of(text, head, tail)])
    return parts


def text_of(value: Any, head: int, tail: int = 0) -> str:
    """Text with every character visible and of bounded length; "" for None.

    >>> text_of("a\\u202eb", 9), text_of("123456789", 2, 3), text_of(None, 1)
    ('a\\\\u202eb', '12\\n[... 4 characters left out ...]\\n789', '')
    """
    if value is None:
        return ""
    text = value if isinstance(value, str) else str(value)
    if len(text) <= head + tail:
        return visible(text)
    end = visible(text[-tail:]) if tail else ""
    return (
        f"{visible(text[:head])}\n[... {len(text) - head - tail} characters left out ...]\n{end}"
    ).rstrip("\n")


def number_of(value: Any) -> float | None:
    """The value as a number; None for what is no number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
