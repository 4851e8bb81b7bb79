"""Models and data files named by an id of the Hugging Face hub in place of a path.

    hf://org/name[@revision]                           a model
    hf://datasets/org/name[@revision]/path/file.jsonl  a file of a data set; a slash in the revision is written %2F

A revision is a branch, a tag or a commit; none is the default branch. Once it is downloaded, its
commit stands behind it, `hf://org/name@main#<commit>`: that is what a run records, and reads again
when it resumes. Files lie in the cache of huggingface_hub. Settings then hold their places there,
in a `FetchedConfig`, which has the ids for whatever is written or compared. huggingface_hub runs in
a process of its own (`hub_client`), which is killed at the time limit.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlmath.config.help import raise_problems, section_classes, setting_values
from rlmath.config.schema import Config, SaveConfig

logger = logging.getLogger(__name__)

PREFIX = "hf://"
_DATASETS = "datasets/"
MODEL_SETTINGS = ("model.path", "critic.path", "teacher.path")
DATA_SETTINGS = (
    "data.train_path",
    "data.more_train_paths",
    "validation.paths",
    "sft.held_out_path",
)
MODEL_FORM = "hf://org/name or hf://org/name@revision"
DATA_FORM = (
    "hf://datasets/org/name/file.jsonl or hf://datasets/org/name@revision/folder/file.parquet"
)
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
METADATA_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
"""A model's configuration, tokenizer and the index of its weights."""
WEIGHT_PATTERN = "*.safetensors"
"""No other format of weights is ever downloaded: the others run code when they are read."""
FOLDERS = "*/*"
"""Pattern of files in folders of a model's repository, which are not downloaded."""

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_AT = r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._+%/-]{0,199}?))?(?:#(?P<commit>[0-9a-f]{40}))?"
_MODEL_ID = re.compile(rf"hf://(?!datasets/)(?P<repo>{_NAME}/{_NAME}){_AT}")
_DATA_ID = re.compile(
    rf"hf://datasets/(?P<repo>{_NAME}/{_NAME}){_AT.replace('%/', '%')}/(?P<file>.+)"
)


class HubFailedError(RuntimeError):
    """Failure of the hub or the network to it, where the cache lacks what is needed.

    The same command may succeed later, so this is no mistake of the user's."""


@dataclass(frozen=True)
class HubId:
    """A model, or a file of a data set, on the hub."""

    repo: str
    revision: str = ""
    """Requested revision; "": the default branch."""
    commit: str = ""
    """Commit that the revision stands for; "": not known yet."""
    file: str = ""
    """Path of the data set's file; "" for a model."""

    @property
    def repo_type(self) -> str:
        return "dataset" if self.file else "model"

    @property
    def repo_folder(self) -> Path:
        return cache_folder() / f"{self.repo_type}s--{self.repo.replace('/', '--')}"

    @property
    def place(self) -> str:
        """The folder, or the data set's file, in this machine's cache.

        It is there once the commit is downloaded."""
        return str(self.repo_folder / "snapshots" / self.commit / self.file)

    def __str__(self) -> str:
        revision = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        commit = f"#{self.commit}" if self.commit else ""
        kind, file = (_DATASETS, f"/{self.file}") if self.file else ("", "")
        return f"{PREFIX}{kind}{self.repo}{revision}{commit}{file}"


def cache_folder() -> Path:
    """The cache of huggingface_hub.

    The library's variables are read here for ranks that do not import it."""
    variables = os.environ
    caches = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or os.path.join(caches, "huggingface")
    cache = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(cache)).expanduser()


def is_hub_id(text: str | None) -> bool:
    """Whether a path is meant as an id of the hub, rightly written or not.

    Nothing else is ever asked of the hub."""
    return text is not None and text.startswith("hf:/")


def parse_hub_id(text: str, setting: str) -> HubId:
    """ValueError where the id of a setting or an option is not written as such.

    >>> parse_hub_id("hf://datasets/org/name@main/a/b.jsonl", "data.train_path")
    HubId(repo='org/name', revision='main', commit='', file='a/b.jsonl')
    """
    is_data = setting in DATA_SETTINGS
    match = (_DATA_ID if is_data else _MODEL_ID).fullmatch(text)
    parts = (
        {name: part or "" for name, part in match.groupdict().items()} if match else {"repo": ""}
    )
    revision = parts.get("revision", "").replace("%2F", "/")
    file = parts.get("file", "")
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
    """Ids of the hub that the settings name.

    ValueError that lists all wrong ones, and other settings that name one."""
    ids = []
    problems = []
    values = setting_values(config).items()
    texts = [
        (key, text)
        for key, value in values
        for text in (value if isinstance(value, list) else [value])
    ]
    for key, text in texts:
        if not isinstance(text, str) or not is_hub_id(text):
            continue
        try:
            if key not in (*MODEL_SETTINGS, *DATA_SETTINGS):
                raise ValueError(f'{key} is "{text}"; needed: a path on this machine.')
            ids.append(parse_hub_id(text, key))
        except ValueError as error:
            problems.append(str(error))
    raise_problems("the names of the Hugging Face hub", problems)
    return list(dict.fromkeys(ids))


@dataclass(frozen=True)
class FetchedConfig(Config):
    """Settings that hold places in this machine's cache where they named ids of the hub."""

    ids: Mapping[tuple[str, str], HubId] = field(default_factory=dict)
    """The id, with its commit, by setting and place; no setting."""


def with_places(config: Config, pins: Mapping[HubId, HubId]) -> FetchedConfig:
    """The settings with the places of their ids, each of which `pins` gives with its commit."""

    def placed(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [placed(key, path) for path in value]
        if not is_hub_id(value):
            return value
        pinned = pins[parse_hub_id(value, key)]
        ids[key, pinned.place] = pinned
        return pinned.place

    ids: dict[tuple[str, str], HubId] = {}
    sections = {name: getattr(config, name) for name in section_classes()}
    for key in (*MODEL_SETTINGS, *DATA_SETTINGS):
        section, _, name = key.partition(".")
        settings = sections[section]
        sections[section] = replace(settings, **{name: placed(key, getattr(settings, name))})
    return FetchedConfig(**sections, ids=ids)


def as_hub_ids(config: Config, key: str, value: Any) -> Any:
    """A setting's value with the id, and its commit, in place of what was fetched by it."""
    if not isinstance(config, FetchedConfig):
        return value
    if isinstance(value, list):
        return [as_hub_ids(config, key, path) for path in value]
    return str(config.ids[key, value]) if (key, value) in config.ids else value


def is_same(old: Any, new: Any) -> bool:
    """Whether two values of a setting are equal as they are written down.

    An id without a commit, of settings that are not fetched yet, is the same as a recorded one: it
    will have that one's commit."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(is_same, old, new))
    if isinstance(old, str) and is_hub_id(old) and old != new:
        old = re.sub("#[0-9a-f]{40}", "", old, count=1)
    return old == new


# ---------------------------------------------------------------- downloads


def fetch(
    ids: Collection[HubId], seconds: float, recorded: Collection[HubId] = (), weights: bool = True
) -> dict[HubId, HubId]:
    """Have ids in this machine's cache, and return every id with its commit.

    Models are without their weights where `weights` is false. A commit is the id's own, that of
    `recorded`, ids of an earlier start of the run, where one asks for the same, else the hub's, or
    where that gives no answer the cache's. ValueError or HubFailedError within `seconds` where that
    cannot be done. For one process of a node."""
    ends = time.monotonic() + seconds
    recorded_commits = {replace(hub_id, commit=""): hub_id.commit for hub_id in recorded}
    pins = {}
    for hub_id in ids:
        asked_id = replace(hub_id, commit=hub_id.commit or recorded_commits.get(hub_id, ""))
        pins[hub_id] = pinned = replace(
            hub_id, commit=_ask(_request(asked_id, weights), seconds, ends)
        )
        needed = pinned.file or "config.json"
        if not (pinned.repo_folder / "snapshots" / pinned.commit / needed).is_file():
            raise ValueError(
                f'{hub_id}: there is no file "{needed}" in it (commit {pinned.commit}). Look at '
                "its files on the hub, "
                "and correct the id."
            )
    return pins


def _request(hub_id: HubId, weights: bool) -> dict[str, Any]:
    """Request to `hub_client` for a download, with advice for users without a network."""
    patterns = [*METADATA_PATTERNS, *([WEIGHT_PATTERN] if weights else ())]
    command = f"hf download {hub_id.repo}" + (
        f" {hub_id.file} --repo-type dataset" if hub_id.file else ""
    )
    revision = hub_id.commit or hub_id.revision or None
    if revision:
        command += f" --revision {revision}"
    return {
        "name": str(hub_id),
        "blobs": str(hub_id.repo_folder / "blobs"),
        "download": {
            "repo_id": hub_id.repo,
            "repo_type": hub_id.repo_type,
            "revision": revision,
            "cache_dir": str(cache_folder()),
            "allow_patterns": glob.escape(hub_id.file) if hub_id.file else patterns,
            "ignore_patterns": None if hub_id.file else FOLDERS,
        },
        "advice": (
            ", and what is needed is not, or not whole, in the cache. The same command goes on "
            "with what is missing. "
            f'Or run "{command}" where there is a network, with the same HF_HOME, or give a local '
            "folder."
        ),
    }


def missing_weights(pinned: HubId) -> int | None:
    """Bytes of weights of a fetched model that are not in the cache.

    None where the cache has no listing of them."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with suppress(CachedRepoTreeNotFoundError):
        files = get_cached_repo_tree(pinned.repo, revision=pinned.commit, cache_dir=cache_folder())
        weights = [
            file for file in files if Path(file.path).match(WEIGHT_PATTERN) and "/" not in file.path
        ]
        return sum(file.size for file in weights if not Path(pinned.place, file.path).is_file())
    return None


def local_folder(place: str, option: str, weights: bool = True, seconds: float = 3600.0) -> Path:
    """A model's folder, for a program of one process.

    It is as given, or fetched where `option` got an id. ValueError or HubFailedError within
    `seconds` where that cannot be done."""
    if not is_hub_id(place):
        return Path(place)
    (pinned,) = fetch([parse_hub_id(place, option)], seconds, weights=weights).values()
    return Path(pinned.place)


def cached_folder(place: str, option: str) -> Path:
    """A model's folder, without the network: as given, or the place of an id with its commit.

    It need not be there."""
    return Path(parse_hub_id(place, option).place if is_hub_id(place) else place)


def _ask(request: Mapping[str, Any], seconds: float, ends: float) -> str:
    """The commit in the client's answer.

    ValueError with the client's error. HubFailedError where the error may pass, where the client
    ends without an answer, and at `ends`, `seconds` after the first request (time.monotonic)."""
    name = request["name"]
    program = str(Path(__file__).with_name("hub_client.py"))
    logger.info(
        "Asking the Hugging Face hub, for at most %.0f s: %s", ends - time.monotonic(), name
    )
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
            f"{name}: the hub was not done after {seconds:g} s (run.hub_timeout_seconds). Look at "
            "the network; where "
            "it is only slow raise it: whole files that have come stay in the cache."
        ) from None
    try:
        answer = json.loads(client.stdout)
    except ValueError:
        last_line = (client.stderr.strip().splitlines() or ["no word"])[-1]
        text = f"{name}: the client of the hub ended with {client.returncode}: {last_line:.300}"
        raise HubFailedError(text) from None
    if "error" in answer:
        raise (HubFailedError if answer["may_pass"] else ValueError)(answer["error"])
    return answer["commit"]


def client_environment() -> dict[str, str]:
    """This process's environment, open to the network again.

    It lacks what `rlmath` has set by itself to keep other libraries off the network."""
    variables = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if variables.pop("RLMATH_SET_OFFLINE", None):
        variables["HF_HUB_OFFLINE"] = "0"
    return variables


# ---------------------------------------------------------------- push


def push_problems(save: SaveConfig, pushes: bool) -> Iterator[str]:
    """Problems of `save.push_to_hub`, found without the network.

    `pushes` is true of the rank that pushes, which needs a token."""
    name = save.push_to_hub
    if name is None:
        return
    if not _is_repo(name):
        yield f'save.push_to_hub is "{name}"; needed: the id of a repository, org/name.'
    if not save.export_hf:
        yield (
            "save.push_to_hub needs the exported model. Set save.export_hf=true, or "
            "save.push_to_hub=null."
        )
    if not pushes:
        return
    from huggingface_hub import get_token

    if client_environment().get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield (
            "save.push_to_hub needs a network. Unset HF_HUB_OFFLINE, or set save.push_to_hub=null."
        )
    if not get_token():
        yield (
            "save.push_to_hub needs a token of the hub. Set HF_TOKEN, or set save.push_to_hub=null."
        )


def push(name: str, folder: str | Path, message: str, seconds: float) -> str:
    """Upload a folder to the repository `name` and return the commit.

    Where there is none, a private one is made. ValueError or HubFailedError within `seconds` where
    that cannot be done."""
    upload = {"repo_id": name, "folder_path": str(folder), "commit_message": message}
    return _ask({"name": name, "push": upload, "advice": "."}, seconds, time.monotonic() + seconds)
