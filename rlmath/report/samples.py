"""Sampled groups of a run, some of which are read.

The texts come from a model and the files may be damaged: whatever a field holds becomes a text without control
characters, a number or nothing, and all of it is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.config.run_files import SAMPLES_FOLDER
from rlmath.config.terminal import visible
from rlmath.telemetry.samples import read_samples, sample_files

MOST_FAILURE_FILES = 5

SHOWN_STEPS, SHOWN_GROUPS, SHOWN_COMPLETIONS = 40, 4, 16
"""In the page: steps of a run, groups of a step, completions of a group."""
SHOWN_CHARS = 3 * 2**20
"""Of all texts of all runs in the page."""
HEAD_CHARS, TAIL_CHARS = 2500, 1500
"""Of a longer completion, whose answer is at its end."""
SHORT_CHARS = 300


def samples_of(folder: Path, notes: list[str], most_chars: int = SHOWN_CHARS) -> list[dict[str, Any]]:
    """Groups of the run in a folder, by rising step, as page.js reads them; none where it has none. `most_chars` bounds
    their texts. What was left out is added to `notes`."""
    found, failures = sample_files(folder), sample_files(folder, "failure")
    damaged = 0
    by_step: dict[int, list[dict[str, Any]]] = {}
    for step in _spread(list(found), SHOWN_STEPS):
        by_step[step], broken = _read_groups(found[step], step, "step")
        damaged += broken
    failed: list[dict[str, Any]] = []
    for step in _spread(list(failures), MOST_FAILURE_FILES):
        groups, broken = _read_groups(failures[step], step, "failure")
        damaged += broken
        failed += groups[:1]
    if damaged:
        notes.append(f"{SAMPLES_FOLDER}/: {damaged} lines or files are no samples and were left out.")
    shown = _shown(by_step, failed, most_chars)
    in_page = len({group["step"] for group in shown if group["kind"] == "step"})
    if 0 < in_page < len(found):
        notes.append(
            f"The page has samples of {in_page} of the {len(found)} steps that have some, spread evenly."
        )
    return shown


def _spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of them, evenly, the first and the last among them.

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
    groups, damaged = [], 0
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
    """ValueError and its like for a row that is none."""
    if isinstance(row, ValueError):
        raise row
    solutions = row["solutions"] if isinstance(row.get("solutions"), list) else []
    completions = [_completion(one) for one in row["completions"][:256]]
    return {
        "step": step,
        "kind": kind,
        "id": text_of(row.get("prompt_id"), SHORT_CHARS),
        "prompt": text_of(row["prompt"], HEAD_CHARS, TAIL_CHARS),
        "solutions": [text_of(one, SHORT_CHARS) for one in solutions[:8]],
        "right": sum(one["correct"] for one in completions),
        "sampled": len(completions),
        "completions": completions,
    }


def _completion(one: Any) -> dict[str, Any]:
    rewards = one.get("rewards") if isinstance(one.get("rewards"), dict) else {}
    failures = one.get("failures") if isinstance(one.get("failures"), dict) else {}
    return {
        "reward": number_of(one.get("reward")),
        "advantage": number_of(one.get("advantage")),
        "correct": one.get("correct") is True,
        "verdict": text_of(one.get("verdict"), 40),
        "extracted": text_of(one.get("extracted"), SHORT_CHARS),
        "length": number_of(one.get("length")),
        "finish": text_of(one.get("finish_reason"), 40),
        "rewards": [[text_of(name, 60), number_of(value)] for name, value in list(rewards.items())[:16]],
        "failures": [
            [text_of(name, 60), text_of(why, SHORT_CHARS)] for name, why in list(failures.items())[:16]
        ],
        "text": text_of(one["text"], HEAD_CHARS, TAIL_CHARS),
    }


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
    return f"{visible(text[:head])}\n[... {len(text) - head - tail} characters left out ...]\n{end}".rstrip(
        "\n"
    )


def number_of(value: Any) -> float | None:
    """None for what is no number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _shown(
    by_step: dict[int, list[dict[str, Any]]], failed: list[dict[str, Any]], most_chars: int
) -> list[dict[str, Any]]:
    """Of as many steps, spread evenly, as the bounds take."""
    bounded = {step: [_bounded(group) for group in groups[:SHOWN_GROUPS]] for step, groups in by_step.items()}
    extra = [_bounded(group) for group in failed]
    steps, count = sorted(step for step, groups in bounded.items() if groups), SHOWN_STEPS
    while count:
        chosen = [group for step in _spread(steps, count) for group in bounded[step]]
        if sum(map(_chars, (*chosen, *extra))) <= most_chars:
            return sorted([*chosen, *extra], key=lambda group: group["step"])
        count = min(count, len(steps)) * 3 // 4
    return []


def _bounded(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "completions": group["completions"][:SHOWN_COMPLETIONS]}


def _chars(group: dict[str, Any]) -> int:
    return len(group["prompt"]) + sum(len(one["text"]) + 300 for one in group["completions"])
