"""The inputs of a step's update, kept for the last step and written for `rlmath replay`.

    captures/step-000010/capture.json        where the run stood, what the step's update gave
                         config.yaml         all settings
                         groups.jsonl        a row per sampled group: prompt, texts, rewards, scores, which are learned
                         tokens.safetensors  token ids and log-probs of all groups, one completion behind the other
                         routes-00000.safetensors, ...   experts of the completions that are learned from, of each rank
                                             that sampled some (`route_files`), where the update replays them

`capture.json` has digests of all but config.yaml: a changed byte is noticed, in the routes when they
are replayed. Paths in config.yaml
may be edited.

Written after the steps of `telemetry.capture_steps`, with digests of the weights before and after;
and, without those, for the last step of a run that fails or diverges. The weights that the step
began with are those of the run's checkpoint with so many steps done; before the first step, of
`model.path`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlmath.algorithms.dynamic_sampling import Chosen
from rlmath.algorithms.types import Completion, Prompt, ScoredGroup
from rlmath.checkpoint.directory import PARTIAL, file_entry
from rlmath.checkpoint.unfinished_groups import (
    TokenReader,
    place_rows,
    read_call,
    read_count,
    read_figures,
    read_place,
    read_score,
    read_segments,
    read_text,
    route_file,
    segment_rows,
)
from rlmath.config.files import parse_json, read_regular, require_regular
from rlmath.config.run_files import CAPTURES_FOLDER, CONFIG_FILE

CAPTURE_FILE = "capture.json"
GROUPS_FILE = "groups.jsonl"
TOKENS_FILE = "tokens.safetensors"
VERSION = 2
VERSION_WITH_ROUTES = 3
_WITHOUT_ROUTES = "policy.routing_replay=none replays without routes: tokens may take other experts than in the run"
_MOST_BYTES = 2**34
"""Most bytes of a file that is read."""
_DIGESTED = (GROUPS_FILE, TOKENS_FILE)


@dataclass(frozen=True)
class CapturedMinibatch:
    """The results of a minibatch, as in `MinibatchResult`."""

    numbers: dict[str, float]
    """Sums, maxima, "grad_norm" and "learning_rate"."""
    discarded: str | None
    """Why it was discarded."""


@dataclass(frozen=True)
class CapturedUpdate:
    minibatches: list[CapturedMinibatch]
    critic_minibatches: list[CapturedMinibatch]
    advantages: list[list[float]]
    """Advantages by learned group and completion."""
    weights_after: str | None = None
    """SHA-256 of all tensors as Hugging Face names them; None if not taken, or on a rank but 0."""


@dataclass(frozen=True)
class Capture:
    step: int
    """Counted from 0; as many steps were done before."""
    reason: str
    """Why it was written."""
    settings_yaml: str
    total_steps: int
    length_stage: int
    """Counted from 0."""
    sampling_seed: int
    """The seed that `PromptOrder.seed_at` gives."""
    rollbacks: int
    """Rollbacks made before, by which the learning rate is lower."""
    layout: str
    world_size: int
    groups: list[ScoredGroup]
    """All that were sampled."""
    chosen: list[tuple[int, ...]]
    """Positions of the completions of each that were learned from."""
    own_advantages: list[list[float]] | None = None
    """Advantages by learned group and completion, if a function of the user's gave them."""
    update: CapturedUpdate | None = None
    """The update's results; None if it did not end."""
    weights_before: str | None = None
    """The digest before the update, taken as `CapturedUpdate.weights_after`."""
    versions: dict[str, str] = field(default_factory=dict)
    route_files: dict[str, str] = field(default_factory=dict, compare=False)
    """SHA-256 of the files of routes by their names; to be written, they are in `route_folder`."""
    folder: Path | None = field(default=None, compare=False)
    """The folder that it was read from."""

    @property
    def has_routes(self) -> bool:
        """Whether the update can replay the experts of all completions that it learns from."""
        completions = [completion for group in self.learned for completion in group.completions]
        return all(completion.routes_at for completion in completions)

    @property
    def learned(self) -> list[ScoredGroup]:
        """The groups with the completions that were learned from, as `Selection.learned`."""
        return [
            Chosen(samples).learned(group)
            for group, samples in zip(self.groups, self.chosen, strict=True)
            if samples
        ]


# ---------------------------------------------------------------- files


def folder_of(output_dir: Path, step: int) -> Path:
    """The folder of the capture of a step, counted from 0."""
    return output_dir / CAPTURES_FOLDER / f"step-{step + 1:06d}"


def route_folder(output_dir: Path, step: int) -> Path:
    """The folder where the files of routes of a step, counted from 0, wait for its capture."""
    folder = folder_of(output_dir, step)
    return folder.with_name(f"{folder.name}.routes{PARTIAL}")


def write_capture(output_dir: Path, capture: Capture, since: float = math.inf) -> Path | None:
    """Write it whole, in the place of an earlier one of the same step; its folder.

    The files of routes are moved from `route_folder`. None where another rank is writing the same
    step, or has written it after `since` (seconds since 1970). OSError where the disk refuses."""
    folder = folder_of(output_dir, capture.step)
    if (folder / CAPTURE_FILE).is_file() and (folder / CAPTURE_FILE).stat().st_mtime > since:
        return None
    partial = folder.with_name(f"{folder.name}{PARTIAL}")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        return None
    try:
        files = {
            CONFIG_FILE: capture.settings_yaml.encode(),
            TOKENS_FILE: _tokens_of(capture.groups),
            GROUPS_FILE: "".join(
                f"{json.dumps(_group_row(group, samples, bool(capture.route_files)))}\n"
                for group, samples in zip(capture.groups, capture.chosen, strict=True)
            ).encode(),
        }
        digests = {name: _digest(files[name]) for name in _DIGESTED} | capture.route_files
        header = _header(capture) | {"digests": digests}
        files[CAPTURE_FILE] = f"{json.dumps(header, indent=1)}\n".encode()
        for name, content in files.items():
            (partial / name).write_bytes(content)
        for name in capture.route_files:
            (route_folder(output_dir, capture.step) / name).rename(partial / name)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _header(capture: Capture) -> dict[str, Any]:
    """The contents of CAPTURE_FILE: all but what has files of its own.

    The step is counted from 1 there."""
    header = asdict(replace(capture, step=capture.step + 1, settings_yaml="", groups=[], chosen=[]))
    for name in ("settings_yaml", "groups", "chosen", "route_files", "folder"):
        del header[name]
    return {"version": VERSION_WITH_ROUTES if capture.route_files else VERSION, **header}


def _group_row(group: ScoredGroup, samples: Sequence[int], with_routes: bool) -> dict[str, Any]:
    """A group as JSON, without its tokens; `samples` are the completions learned from.

    They have the places of their routes, if those are written, too."""
    prompt = group.prompt
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "prompt_tokens": len(prompt.token_ids),
        "solutions": list(prompt.solutions),
        "task": prompt.task,
        "more": prompt.more_json,
        "question": prompt.question,
        "learned": list(samples),
        "completions": [
            {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "segments": segment_rows(completion.segments),
                **({"calls": list(map(asdict, completion.calls))} if completion.calls else {}),
                **({"figures": list(completion.figures)} if completion.figures else {}),
                **(
                    {"routes": place_rows(completion.routes_at)}
                    if with_routes and index in samples
                    else {}
                ),
                "score": asdict(score),
            }
            for index, (completion, score) in enumerate(
                zip(group.completions, group.scores, strict=True)
            )
        ],
    }


def _tokens_of(groups: Sequence[ScoredGroup]) -> bytes:
    """The tokens of all groups in order, as a safetensors file."""
    prompt_tokens = array("i")
    completion_tokens = array("i")
    logprobs = array("f")
    for group in groups:
        prompt_tokens.extend(group.prompt.token_ids)
        for completion in group.completions:
            completion_tokens.extend(completion.token_ids)
            logprobs.extend(completion.logprobs)
    return save(
        {
            "prompt_tokens": np.frombuffer(prompt_tokens, np.int32),
            "tokens": np.frombuffer(completion_tokens, np.int32),
            "logprobs": np.frombuffer(logprobs, np.float32),
        }
    )


def read_capture(folder: Path) -> Capture:
    """Read a capture; ValueError if it is unreadable, has changed or is of a later version.

    The files of routes are not read: `check_route_files`."""
    try:
        files = {
            name: read_regular(folder / name, _MOST_BYTES)
            for name in (CAPTURE_FILE, CONFIG_FILE, *_DIGESTED)
        }
    except OSError as error:
        raise ValueError(
            f'the capture "{folder}" cannot be read: {error.strerror}: {error.filename}'
        ) from error
    try:
        header = parse_json(files[CAPTURE_FILE].decode())
        if (version := header.pop("version")) not in (VERSION, VERSION_WITH_ROUTES):
            raise ValueError(
                f"its form is version {version!r}; needed: {VERSION} or {VERSION_WITH_ROUTES}"
            )
        digests = header.pop("digests")
        header["step"] -= 1
        for name in (
            "step",
            "total_steps",
            "length_stage",
            "sampling_seed",
            "rollbacks",
            "world_size",
        ):
            read_count(header[name])
        for name in _DIGESTED:
            _check_digest(name, files[name], digests)
        rows = list(_read_groups(files[GROUPS_FILE].splitlines(), load(files[TOKENS_FILE])))
        update = header.pop("update")
        weights_before = header.pop("weights_before")
        return Capture(
            settings_yaml=files[CONFIG_FILE].decode(),
            groups=[group for group, _ in rows],
            chosen=[samples for _, samples in rows],
            update=None if update is None else _read_update(update),
            weights_before=_read_digest(weights_before),
            route_files={name: digests[name] for name in digests if name not in _DIGESTED},
            folder=folder,
            **header,
        )
    except (
        OSError,
        SafetensorError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
    ) as error:
        raise ValueError(
            f'the capture "{folder}" is damaged ({type(error).__name__}: {error})'
        ) from error


def check_route_files(capture: Capture, rank: int, world_size: int) -> None:
    """Refuse a capture of which a file that this of so many ranks reads has changed or is lost.

    The files are those of routes of what is learned from. They are read whole. ValueError."""
    assert capture.folder is not None, "it was read"
    completions = [completion for group in capture.learned for completion in group.completions]
    ranks = {place.rank for completion in completions for place in completion.routes_at}
    for name in [route_file(sampler) for sampler in sorted(ranks) if sampler % world_size == rank]:
        path = capture.folder / name
        try:
            require_regular(path)
            digest = file_entry(path).sha256
        except OSError as error:
            raise ValueError(
                f'the capture "{capture.folder}" cannot be read: {error.strerror}: {path}. '
                f"{_WITHOUT_ROUTES}"
            ) from error
        if capture.route_files.get(name, digest) != digest:
            raise ValueError(
                f'the capture "{capture.folder}" is damaged: {name} is not as it was written. '
                f"{_WITHOUT_ROUTES}"
            )


def _check_digest(name: str, content: bytes, digests: Mapping[str, str]) -> None:
    """Refuse a file whose content has changed, by a ValueError."""
    if name in digests and _digest(content) != digests[name]:
        raise ValueError(f"{name} is not as it was written")


def _read_update(row: dict[str, Any]) -> CapturedUpdate:
    for kind in ("minibatches", "critic_minibatches"):
        row[kind] = [CapturedMinibatch(**minibatch_row) for minibatch_row in row[kind]]
    digest = row.pop("weights_after")
    return CapturedUpdate(**row, weights_after=_read_digest(digest))


def _read_digest(value: Any) -> str | None:
    """Earlier captures have further figures beside it."""
    return value["digest"] if isinstance(value, dict) else value


def _read_groups(
    lines: Sequence[bytes], tensors: Mapping[str, np.ndarray]
) -> Iterator[tuple[ScoredGroup, tuple[int, ...]]]:
    """Groups in order, each with the positions of the completions that were learned from.

    `tensors` have the tokens of all groups, one after another."""
    prompts = tensors["prompt_tokens"]
    tokens = TokenReader(tensors["tokens"], tensors["logprobs"])
    end = 0
    for row in map(parse_json, map(bytes.decode, lines)):
        start, end = end, end + read_count(row["prompt_tokens"])
        prompt = Prompt(
            str(row["prompt_id"]),
            str(row["prompt"]),
            token_ids=tuple(prompts[start:end].tolist()),
            solutions=tuple(map(str, row["solutions"])),
            task=str(row["task"]),
            more_json=str(row["more"]),
            question=str(row.get("question", "")),  # earlier captures have none
        )
        completions = tuple(
            _read_completion(index, completion_row, tokens)
            for index, completion_row in enumerate(row["completions"])
        )
        for completion in completions:
            tokens_read = len(prompt.token_ids) + len(completion.token_ids) - 1
            routed_tokens = sum(place.tokens for place in completion.routes_at)
            if completion.routes_at and routed_tokens != tokens_read:
                raise ValueError(f"{tokens_read} tokens need routes, and {routed_tokens} have some")
        scores = tuple(read_score(completion_row["score"]) for completion_row in row["completions"])
        yield ScoredGroup(prompt, completions, scores), tuple(map(read_count, row["learned"]))
    tokens.check_end()


def _read_completion(index: int, row: Any, tokens: TokenReader) -> Completion:
    """The completion of a row, with the next of the tokens."""
    segments = read_segments(row)
    token_ids, logprobs = tokens.read(sum(segment.tokens for segment in segments))
    return Completion(
        index,
        token_ids,
        logprobs=logprobs,
        text=read_text(row["text"]),
        finish_reason=row["finish_reason"],
        policy_version=segments[-1].policy_version,
        segments=segments,
        calls=tuple(map(read_call, row.get("calls", ()))),
        figures=read_figures(row),
        routes_at=tuple(map(read_place, row.get("routes", ()))),
    )
