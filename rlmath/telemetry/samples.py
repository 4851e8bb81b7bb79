"""Samples of every step, kept to be read: how they are written and read.

A few groups have their prompt, texts, rewards and advantages."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.answers.verifier import FAILURES
from rlmath.config.files import parse_json
from rlmath.config.help import counted
from rlmath.config.run_files import SAMPLES_FOLDER, remove_unfinished, write_whole
from rlmath.config.terminal import excerpt, visible
from rlmath.telemetry.metrics_writer import json_number

if TYPE_CHECKING:  # importing it imports torch, which the tool that shows samples does not need
    from rlmath.algorithms.types import Score, ScoredGroup, ToolCall

logger = logging.getLogger(__name__)

_OWN_NAME = re.compile(r"(?P<kind>step|failure)-(?P<step>\d{6,})\.jsonl", re.ASCII)


def samples_file(output_dir: str, step: int, kind: str = "step") -> Path:
    return Path(output_dir) / SAMPLES_FOLDER / f"{kind}-{step:06d}.jsonl"


def keep_samples(output_dir: str | Path, last_step: int) -> None:
    """Remove the samples of steps after `last_step`, and unfinished files.

    Other files stay."""
    remove_unfinished(Path(output_dir) / SAMPLES_FOLDER)
    files_by_kind = (sample_files(output_dir), sample_files(output_dir, "failure"))
    later = [path for files in files_by_kind for step, path in files.items() if step > last_step]
    for path in later:
        path.unlink()
    if later:
        text = "%d files of %s/ of steps after step %d are removed; the run makes these steps again"
        logger.info(text, len(later), SAMPLES_FOLDER, last_step)


def sample_files(output_dir: str | Path, kind: str = "step") -> dict[int, Path]:
    """A run's files of samples by rising step.

    With the kind "failure" they are of what could not be judged."""
    names = (
        (_OWN_NAME.fullmatch(path.name), path)
        for path in (Path(output_dir) / SAMPLES_FOLDER).glob("*")
    )
    return dict(
        sorted(
            (int(m["step"]), path)
            for m, path in names
            if m and m["kind"] == kind and path.is_file()
        )
    )


def read_samples(path: Path) -> Iterator[tuple[int, dict | ValueError]]:
    """(number from 1, group or why it is none) of every line of a file.

    OSError where it cannot be read."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            group = parse_json(line.decode("utf-8"))
            if not all(isinstance(completion, dict) for completion in group["completions"]):
                raise ValueError("a completion is no object")
            yield number, group
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {excerpt(str(error), 80)}"
            yield number, ValueError(f"{path}, line {number}: not a row of samples ({problem})")


class SampleWriter:
    """Writes the first `groups_per_step` groups of each step; 0 writes nothing."""

    def __init__(self, output_dir: str, groups_per_step: int, rewards: Sequence[str] = ()) -> None:
        """`rewards` are the names of several rewards, in the order of the scores' parts."""
        self._output_dir = output_dir
        self._groups_per_step = groups_per_step
        self._rewards = rewards

    def write(
        self, step: int, groups: Sequence[ScoredGroup], advantages: Sequence[Sequence[float]]
    ) -> None:
        """`samples/step-000001.jsonl`, one row per group, in ASCII; one written before is replaced.

        `advantages` has a list per group and a number per completion. OSError where it cannot be
        written."""
        shown_groups = groups[: self._groups_per_step]
        if not shown_groups:
            return
        assert len(advantages) >= len(shown_groups)
        rows = [
            _row(group, group_advantages, self._rewards)
            for group, group_advantages in zip(shown_groups, advantages, strict=False)
        ]
        _write_rows(samples_file(self._output_dir, step), rows)

    def write_failure(
        self, step: int, groups: Sequence[ScoredGroup], advantages: Sequence[Sequence[float]]
    ) -> Path:
        """`samples/failure-000001.jsonl`: the first group with an unscored completion.

        OSError if it is not written."""
        path = samples_file(self._output_dir, step, "failure")
        for group, group_advantages in zip(groups, advantages, strict=False):
            if any(score.verdict in FAILURES or score.failures for score in group.scores):
                _write_rows(path, [_row(group, group_advantages, self._rewards)])
                break
        return path


def _write_rows(path: Path, rows: Sequence[dict]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _row(group: ScoredGroup, advantages: Sequence[float], rewards: Sequence[str]) -> dict:
    """A group as a row of a file of samples."""
    completions = [
        {
            "reward": json_number(score.reward),
            **_parts(score, rewards),
            "advantage": json_number(advantage),
            "correct": score.correct,
            "verdict": score.verdict,
            "extracted": score.extracted,
            "boxed": score.boxed,
            "length": completion.n_sampled,
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            "segments": [
                [sum(segment.tokens for segment in segments if segment.sampled), version]
                for version, segments in groupby(
                    completion.segments, lambda segment: segment.policy_version
                )
            ],
            "text": completion.text,
            **({"calls": list(map(_call_row, completion.calls))} if completion.calls else {}),
        }
        for completion, score, advantage in zip(
            group.completions, group.scores, advantages, strict=True
        )
    ]
    return {
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "solutions": list(group.prompt.solutions),
        "completions": completions,
    }


def _call_row(call: ToolCall) -> dict:
    """A call; its code stands in the completion's text, in front of `position`."""
    return {
        "position": call.position,
        "status": call.status,
        "seconds": json_number(call.seconds),
        "output": call.output,
        "cut": call.is_cut,
    }


def text_with_outputs(completion: dict) -> list[tuple[dict | None, str]]:
    """A completion's text in parts: (None, sampled text), and (call, its output) where it stands.

    >>> call = {"position": 2, "output": "4", "status": "ok", "seconds": 0.1}
    >>> [text for _, text in text_with_outputs({"text": "a\\nb", "calls": [call]})]
    ['a\\n', '4', 'b']
    """
    text = completion["text"]
    parts: list[tuple[dict | None, str]] = []
    start = 0
    for call in completion.get("calls") or ():
        end = int(call["position"])
        parts += [(None, text[start:end]), (call, call["output"])]
        start = end
    parts.append((None, text[start:]))
    return [part for part in parts if part[0] is not None or part[1]]


def call_facts(call: dict) -> str:
    """Status and seconds of a call, in one line."""
    cut = ", cut" if call.get("cut") else ""
    return f"{visible(str(call['status']))}, {float(call['seconds']):.2f} s{cut}"


def _parts(score: Score, rewards: Sequence[str]) -> dict:
    """The values of several rewards, null where one failed, and why."""
    if not rewards:
        return {}
    values = (None if value is None else json_number(value) for value in score.parts)
    failures = {
        failure.name: f"{failure.kind}: {failure.message}" if failure.message else failure.kind
        for failure in score.failures
    }
    return {"rewards": dict(zip(rewards, values, strict=True)), "failures": failures}


def completion_facts(completion: dict) -> str:
    """Facts of a completion in one line, without the model's own text.

    They are reward, advantage, verdict, length, end and continuations.

    >>> completion_facts({"reward": 5.0, "advantage": 0.7, "verdict": "string", "correct": True, "length": 12,
    ...                   "finish_reason": "stop"})
    'reward +5, advantage +0.700, right (string), 12 tokens, stop'
    """
    segments = completion.get("segments") or []
    parts = [f"{int(tokens)} of version {int(version)}" for tokens, version in segments]
    versions = f" ({' + '.join(parts)})" if len(parts) > 1 else ""
    judgement = "right" if completion["correct"] else "wrong"
    rewards = completion.get("rewards") or {}
    values = [
        f"{visible(name)} {'failed' if reward is None else format(float(reward), '+g')}"
        for name, reward in rewards.items()
    ]
    values_text = f" ({', '.join(values)})" if values else ""
    calls = completion.get("calls") or ()
    calls_text = f", {counted(len(calls), 'call')}" if calls else ""
    retries = sum(call["status"] == "feedback" for call in calls)
    if retries:
        calls_text = f", answer {retries + 1}"
    return (
        f"reward {float(completion['reward']):+g}{values_text}, advantage "
        f"{float(completion['advantage']):+.3f},"
        f" {judgement} ({visible(completion['verdict'])}), {int(completion['length'])} "
        f"tokens{versions}{calls_text},"
        f" {visible(completion['finish_reason'])}"
    )
