"""Models and data files that are named by an id of the Hugging Face hub in place of a folder or file.

    hf://org/name[@revision]                           a model
    hf://datasets/org/name[@revision]/path/file.jsonl  a file of a data set; a slash in the revision is written %2F

A revision is a branch, a tag or a commit; none is the default branch. Once it is resolved, its commit stands behind it,
`hf://org/name@main#<commit>`: that is what a run records, and reads again when it resumes. Files lie in the cache of
huggingface_hub; settings then hold their places there, and `as_hub_ids` gives the ids back for whatever is written or
compared. huggingface_hub runs in processes of their own (`hub_client`), which are killed at the time limit.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmath.config.help import raise_problems, setting_values
from rlmath.config.schema import Config, SaveConfig

logger = logging.getLogger(__name__)

PREFIX = "hf://"
_DATASETS = "datasets/"
MODEL_SETTINGS = ("model.path", "critic.path", "teacher.path")
DATA_SETTINGS = ("data.train_path", "data.more_train_paths", "validation.paths", "sft.held_out_path")
MODEL_FORM = "hf://org/name or hf://org/name@revision"
DATA_FORM = "hf://datasets/org/name/file.jsonl or hf://datasets/org/name@revision/folder/file.parquet"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_AT = r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._+%/-]{0,199}?))?(?:#(?P<commit>[0-9a-f]{40}))?"
_MODEL_ID = re.compile(rf"hf://(?!datasets/)(?P<repo>{_NAME}/{_NAME}){_AT}")
_DATA_ID = re.compile(rf"hf://datasets/(?P<repo>{_NAME}/{_NAME}){_AT.replace('%/', '%')}/(?P<file>.+)")
_ids: dict[str, str] = {}
"""The place of a file or folder in the cache, to the id, with its commit, by which this process had it fetched."""


class HubFailedError(RuntimeError):
    """The hub or the network to it fails, and what is needed is not in the cache: the same command may succeed later,
    so that this is no mistake of the user's."""


@dataclass(frozen=True)
class HubId:
    """A model, or a file of a data set, on the hub."""

    repo: str
    revision: str = ""
    """As it was asked for; "": the default branch."""
    commit: str = ""
    """What it stands for; "": not resolved."""
    file: str = ""
    """Of a data set; "" for a model."""

    @property
    def asked(self) -> HubId:
        """Without its commit."""
        return replace(self, commit="")

    def __str__(self) -> str:
        revision = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        commit = f"#{self.commit}" if self.commit else ""
        kind, file = (_DATASETS, f"/{self.file}") if self.file else ("", "")
        return f"{PREFIX}{kind}{self.repo}{revision}{commit}{file}"


def with_commit(one: HubId, commit: str) -> HubId:
    """ValueError where it is no hash of a commit."""
    if not _COMMIT.fullmatch(commit):
        raise ValueError(f"{one}: {commit!r:.60} is no commit of 40 hexadecimal digits")
    return replace(one, commit=commit)


def is_hub_id(text: str | None) -> bool:
    """Whether a path is meant as an id of the hub, rightly written or not. Nothing else is ever looked for there."""
    return text is not None and text.startswith("hf:/")


def parse_hub_id(text: str, setting: str) -> HubId:
    """ValueError where the id of a setting or an option is not written as such.

    >>> parse_hub_id("hf://datasets/org/name@main/a/b.jsonl", "data.train_path")
    HubId(repo='org/name', revision='main', commit='', file='a/b.jsonl')
    """
    is_data = setting in DATA_SETTINGS
    found = (_DATA_ID if is_data else _MODEL_ID).fullmatch(text)
    parts = {name: part or "" for name, part in found.groupdict().items()} if found else {"repo": ""}
    revision, file = parts.get("revision", "").replace("%2F", "/"), parts.get("file", "")
    is_plain = not {"", ".", ".."} & {*f"{revision or 'main'}/{file or 'file'}".split("/")}
    if not (
        is_plain
        and "\\" not in file
        and file.isprintable()
        and _is_repo(parts["repo"])
        and (file.endswith(DATA_SUFFIXES) or not is_data)
    ):
        form = f"{DATA_FORM}, a file of {', '.join(DATA_SUFFIXES)}" if is_data else MODEL_FORM
        raise ValueError(f'{setting}: got "{text}"; needed: {form}.')
    commit = parts["commit"] or (revision if _COMMIT.fullmatch(revision) else "")
    return HubId(parts["repo"], revision, commit, file)


def _is_repo(name: str) -> bool:
    return bool(_REPO.fullmatch(name)) and ".." not in name and "--" not in name


# ---------------------------------------------------------------- ids in the settings


def hub_ids(config: Config) -> list[HubId]:
    """Those that the settings name. ValueError that lists all that are wrong, and other settings that name one."""
    found, problems = [], []
    values = setting_values(config).items()
    texts = [(key, text) for key, value in values for text in (value if isinstance(value, list) else [value])]
    for key, text in texts:
        if not isinstance(text, str) or not is_hub_id(text):
            continue
        try:
            if key not in (*MODEL_SETTINGS, *DATA_SETTINGS):
                raise ValueError(f'{key} is "{text}"; needed: a path on this machine.')
            found.append(parse_hub_id(text, key))
        except ValueError as error:
            problems.append(str(error))
    raise_problems("the names of the Hugging Face hub", problems)
    return list(dict.fromkeys(found))


def with_places(config: Config, places: Mapping[HubId, str]) -> Config:
    """The settings with the places of fetched ids; `as_hub_ids` knows them from now on."""

    def place(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [place(key, one) for one in value]
        return places[parse_hub_id(value, key)] if isinstance(value, str) and is_hub_id(value) else value

    changed = config
    for key in (*MODEL_SETTINGS, *DATA_SETTINGS):
        section, _, name = key.partition(".")
        old = getattr(changed, section)
        if (new := place(key, getattr(old, name))) != getattr(old, name):
            changed = replace(changed, **{section: replace(old, **{name: new})})
    return changed


def as_hub_ids(value: Any) -> Any:
    """A setting's value with the id, and its commit, in the place of what was fetched by it."""
    if isinstance(value, list):
        return [as_hub_ids(one) for one in value]
    return _ids.get(value, value) if isinstance(value, str) else value


def is_same(then: Any, now: Any) -> bool:
    """Whether two values of a setting are equal, fetched or not; an id of now without a commit will have that of then,
    where both ask for the same."""
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(is_same, then, now))
    old, new = as_hub_ids(then), as_hub_ids(now)
    if old == new or not (isinstance(old, str) and isinstance(new, str)):
        return old == new
    found = list(_parsed([old, new]))
    return len(found) == 2 and not found[1].commit and found[0].asked == found[1]


# ---------------------------------------------------------------- the hub


def resolve(ids: Sequence[HubId], seconds: float, recorded: Collection[str] = ()) -> dict[HubId, HubId]:
    """Every id with its commit: that of `recorded`, texts of an earlier start of the run, where one asks for the same,
    else the hub's, or where that gives no answer the cache's. Errors: as `fetch`."""
    known = {one.asked: one for one in _parsed(recorded) if one.commit}
    pins = {one: one if one.commit else known.get(one) for one in ids}
    unknown = [one for one, pinned in pins.items() if pinned is None]
    pins |= zip(unknown, fetch(unknown, seconds, weights=False), strict=True)
    return {one: pinned for one, pinned in pins.items() if pinned is not None}


def fetch(ids: Sequence[HubId], seconds: float, weights: bool = True) -> dict[HubId, int]:
    """Have ids in this machine's cache, of models without their weights where those are not needed. Gives every id with
    its commit, and the size of its weights that were not there (bytes). ValueError or HubFailedError within `seconds`
    where that cannot be done. For one process of a node."""
    ends = time.monotonic() + seconds
    found = {}
    for one in ids:
        request = {"action": "fetch", "text": str(one), "name": one.repo, "weights": weights}
        request |= {"revision": one.revision, "commit": one.commit, "file": one.file}
        answer = _ask(request, seconds, ends)
        found[with_commit(one, answer["commit"])] = answer["missing_bytes"]
    return found


def places(ids: Collection[HubId]) -> dict[HubId, str]:
    """Where ids with their commits lie once they are fetched, on this machine: in the cache of huggingface_hub, whose
    variables are read here, for ranks that do not import it. `as_hub_ids` knows the places from now on."""
    variables = os.environ
    home = variables.get("HF_HOME") or os.path.join(
        variables.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    cache = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    found = {}
    for one in ids:
        repo = f"{'dataset' if one.file else 'model'}s--{one.repo.replace('/', '--')}"
        folder = Path(os.path.expandvars(cache)).expanduser() / repo / "snapshots" / one.commit
        found[one] = str(folder / one.file)
        _ids[found[one]] = str(one)
    return found


def local_folder(place: str, option: str, weights: bool = True, seconds: float = 3600.0) -> Path:
    """A model's folder, for a program of one process: as it is given, or fetched where `option` got an id. ValueError
    or HubFailedError within `seconds` where that cannot be done."""
    if not is_hub_id(place):
        return Path(place)
    (found,) = fetch([parse_hub_id(place, option)], seconds, weights)
    return Path(places([found])[found])


def _parsed(texts: Collection[str]) -> Iterator[HubId]:
    for text in texts:
        if is_hub_id(text):
            is_data = text.startswith(PREFIX + _DATASETS)
            try:
                yield parse_hub_id(text, DATA_SETTINGS[0] if is_data else MODEL_SETTINGS[0])
            except ValueError:
                continue


def _ask(request: Mapping[str, Any], seconds: float, ends: float) -> dict[str, Any]:
    """What the client answers. ValueError with its error; HubFailedError where that may pass, where the client ends
    without an answer, and at `ends`, `seconds` after the first request (time.monotonic)."""
    what, program = request["text"], str(Path(__file__).with_name("hub_client.py"))
    logger.info("Asking the Hugging Face hub, for at most %.0f s: %s", ends - time.monotonic(), what)
    try:
        client = subprocess.run(
            [sys.executable, "-P", program, str(os.getpid())],
            input=json.dumps(request),
            capture_output=True,
            env=client_environment(),
            text=True,
            timeout=max(0.01, ends - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        raise HubFailedError(
            f"{what}: the hub was not done after {seconds:g} s (run.hub_timeout_seconds). Look at the network; where "
            "it is only slow raise it: whole files that have come stay in the cache."
        ) from None
    try:
        found = json.loads(client.stdout)
    except ValueError:
        last = (client.stderr.strip().splitlines() or ["no word"])[-1]
        text = f"{what}: the client of the hub ended with {client.returncode}: {last:.300}"
        raise HubFailedError(text) from None
    if "error" in found:
        raise (HubFailedError if found["may_pass"] else ValueError)(found["error"])
    return found


def client_environment() -> dict[str, str]:
    """This process's environment, without what `rlmath` has set by itself to keep other libraries off the network."""
    variables = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if variables.pop("RLMATH_SET_OFFLINE", None):
        variables["HF_HUB_OFFLINE"] = "0"
    return variables


# ---------------------------------------------------------------- push


def push_problems(save: SaveConfig, pushes: bool) -> Iterator[str]:
    """What is wrong with `save.push_to_hub`; `pushes` is of the rank that pushes, which needs a token. Asks nothing
    over the network."""
    name = save.push_to_hub
    if name is None:
        return
    if not _is_repo(name):
        yield f'save.push_to_hub is "{name}"; needed: the id of a repository, org/name.'
    if not save.export_hf:
        yield "save.push_to_hub needs the exported model. Set save.export_hf=true, or save.push_to_hub=null."
    if not pushes:
        return
    from huggingface_hub import get_token

    if client_environment().get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield "save.push_to_hub needs a network. Unset HF_HUB_OFFLINE, or set save.push_to_hub=null."
    if not get_token():
        yield "save.push_to_hub needs a token of the hub. Set HF_TOKEN, or set save.push_to_hub=null."


def push(name: str, folder: str | Path, message: str, seconds: float) -> str:
    """Upload a folder to the repository `name`, which is made, private, where there is none; the commit. ValueError
    or HubFailedError within `seconds` where that cannot be done."""
    request = {"action": "push", "text": name, "name": name, "folder": str(folder), "message": message}
    return _ask(request, seconds, time.monotonic() + seconds)["commit"]
