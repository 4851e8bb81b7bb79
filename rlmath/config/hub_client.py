"""The program that talks to the Hugging Face hub, in a process of its own: `hub` starts it and ends it in time.

    python -P hub_client.py PARENT   with a request in JSON on standard input, and the answer in JSON on standard output

It imports huggingface_hub and nothing of rlmath. What comes from the network is not trusted: names of files and commits
are checked before they are used, and of a server's answer nothing but checked names is repeated in a message.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METADATA_SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Of a model's configuration, tokenizer and the index of its weights."""
WEIGHT_SUFFIX = ".safetensors"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
MOST_FILES = 200_000
"""Of a repository's listing."""
MOST_METADATA_BYTES = 2**28
"""Of one file of a model that is no weights."""
WORKERS = 4
"""Files that are downloaded at a time."""
FREE_BYTES = 2**28
"""Of the cache's disk that stay free."""
INFO_SECONDS = 20.0
"""How long one answer of the hub may take."""

CACHE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Of the disk that has the cache, which the user can mend; any other may be the network's, and pass."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PR_SET_PDEATHSIG = 1


class HubError(Exception):
    """What the user is told."""


class NetworkError(HubError):
    """What the user is told where the hub or the network fails, which may pass."""


class UnreachableError(Exception):
    """The hub gives no answer, or must not be asked (`is_wanted`)."""

    def __init__(self, text: str, is_wanted: bool = False) -> None:
        super().__init__(text)
        self.is_wanted = is_wanted


@dataclass(frozen=True)
class Listed:
    """A file as the hub's listing has it."""

    name: str
    size: int | None
    sha256: str | None
    """Of a large file."""


@dataclass(frozen=True)
class Repo:
    """A repository of the hub, as a request names it."""

    text: str
    """As the user wrote it, for messages."""
    kind: str
    """ "model" or "dataset"."""
    name: str
    revision: str
    commit: str
    file: str
    """Of a data set; "" for a model."""
    is_new: bool
    """The commit is what the hub has now for the revision."""

    @property
    def command(self) -> str:
        """What a user runs to have it in the cache."""
        words = ["hf download", self.name, *([self.file] if self.file else ())]
        words += ["--repo-type dataset"] if self.kind == "dataset" else []
        revision = self.commit or self.revision
        return " ".join([*words, *([f"--revision {revision}"] if revision else ())])


# ---------------------------------------------------------------- what is asked


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request; `error` in it says what is wrong, and `may_pass` whether it is the network."""
    try:
        if request["action"] == "push":
            return {"commit": push(request["repo"], request["folder"], request["message"])}
        repos = [Repo(**one) for one in request["repos"]]
        if request["action"] == "resolve":
            return {"commits": [resolve(repo) for repo in repos]}
        return {"fetched": [fetch(repo, request["weights"]) for repo in repos]}
    except HubError as error:
        return {"error": str(error), "may_pass": isinstance(error, NetworkError)}


def resolve(repo: Repo) -> str:
    """The commit that a revision stands for: of the hub, or where that gives no answer of the cache."""
    try:
        return listing(repo)[0]
    except UnreachableError as why:
        commit = _cached_commit(repo)
        if commit is not None:
            return commit
        raise _not_cached(repo, why) from why


def fetch(repo: Repo, weights: bool) -> dict[str, Any]:
    """Have a repository's commit in the cache, as far as it is needed; of a model its weights only with `weights`, else
    they are counted as `left`."""
    folder = snapshot_folder(repo)
    try:
        _, files = listing(repo)
    except UnreachableError as why:
        _check_cached(repo, folder, why, weights)
        return {"why": str(why), "files": 0, "bytes": 0, "left": 0, "left_bytes": 0}
    wanted = list(needed(repo, files))
    now = [one for one in wanted if weights or not is_weights(one.name)]
    missing = [one for one in wanted if not (folder / one.name).exists()]
    todo = [one for one in now if one in missing]
    _check_space(repo, todo)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda one: download(repo, one, one in todo), now))
    if repo.revision != repo.commit:
        _note_revision(repo)
    left = [one for one in missing if one not in now]
    return {
        "files": len(todo),
        "bytes": sum(one.size or 0 for one in todo),
        "left": len(left),
        "left_bytes": sum(one.size or 0 for one in left),
    }


# ---------------------------------------------------------------- listings


def listing(repo: Repo) -> tuple[str, list[Listed]]:
    """A revision's commit and its files. UnreachableError where the hub gives no answer, HubError where it refuses, or
    answers with what cannot be."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise UnreachableError("HF_HUB_OFFLINE is set", is_wanted=True)
    revision = repo.commit or repo.revision or None
    try:
        info: Any = HfApi().repo_info(
            repo.name, repo_type=repo.kind, revision=revision, files_metadata=True, timeout=INFO_SECONDS
        )
    except GatedRepoError as error:
        raise HubError(
            f"{repo.text}: the hub gives {repo.name} only to those who have accepted its terms. Accept them on its "
            "page, and log in there with `hf auth login` or HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f'{repo.text}: {repo.name} has no revision "{revision}". Give a branch, a tag or a commit of it.'
        ) from error
    except RepositoryNotFoundError as error:
        kind = "data set" if repo.kind == "dataset" else "model"
        raise HubError(
            f"{repo.text}: the hub has no {kind} {repo.name}, or it is private and the token may not read it (status "
            f"{_status(error)}). Correct the name, or log in with `hf auth login` or HF_TOKEN."
        ) from error
    except HfHubHTTPError as error:
        status = _status(error)
        if _may_pass(status):
            raise UnreachableError(f"it answers with status {status}") from error
        raise HubError(f"{repo.text}: the hub refuses with status {status}.{_login(status)}") from error
    except Exception as error:  # of the HTTP library, whose classes are not huggingface_hub's
        if isinstance(error, ValueError | TypeError | KeyError | AttributeError):
            raise HubError(
                f"{repo.text}: the hub's answer cannot be read ({type(error).__name__})."
            ) from error
        raise UnreachableError(f"no answer ({type(error).__name__})") from error
    commit, siblings = info.sha if isinstance(info.sha, str) else "", info.siblings or []
    if not _COMMIT.fullmatch(commit) or (repo.commit and commit != repo.commit):
        raise HubError(
            f"{repo.text}: the hub names the commit {commit!r:.60}; needed: {repo.commit or 'a hash'}."
        )
    if len(siblings) > MOST_FILES:
        raise HubError(f"{repo.text}: its listing has {len(siblings)} files, more than {MOST_FILES}.")
    return commit, [_listed(repo, one) for one in siblings]


def _listed(repo: Repo, sibling: Any) -> Listed:
    name, size = sibling.rfilename, sibling.size
    if not is_plain_name(name):
        raise HubError(
            f"{repo.text}: its listing has the file name {name!r:.100}, which leads out of its folder or cannot be "
            "one. Nothing is downloaded from such a repository."
        )
    sha256 = str(None if sibling.lfs is None else sibling.lfs.sha256)
    fits = isinstance(size, int) and size >= 0
    return Listed(name, size if fits else None, sha256 if _SHA256.fullmatch(sha256) else None)


def is_plain_name(name: object) -> bool:
    """Whether a name is that of a file below its folder, in printable characters."""
    if not isinstance(name, str) or not name or len(name) > 1000 or "\\" in name or not name.isprintable():
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def needed(repo: Repo, files: Sequence[Listed]) -> Iterator[Listed]:
    """What is fetched of a repository: a data set's one file; of a model what lies at its top and is configuration,
    tokenizer or safetensors. No other format of weights is ever fetched: the others run code when they are read."""
    if repo.kind == "dataset":
        found = [one for one in files if one.name == repo.file]
        if not found:
            there = [one.name for one in files if one.name.endswith(DATA_SUFFIXES)]
            names = f"It has {', '.join(there[:6])}{', ...' if there[6:] else ''}." if there else ""
            raise HubError(f'{repo.text}: {repo.name} has no file "{repo.file}". {names}'.rstrip())
        yield from found
        return
    names = {one.name for one in files}
    if "config.json" not in names:
        raise HubError(f"{repo.text}: {repo.name} has no config.json; needed: a model for transformers.")
    if not any("/" not in name and is_weights(name) for name in names):
        raise HubError(
            f"{repo.text}: {repo.name} has no weights in safetensors. Other formats are not read, since they may run "
            "code; give a model that has them, or convert it."
        )
    for one in files:
        if "/" in one.name or one.name.startswith("."):
            continue
        if is_weights(one.name):
            yield one
        elif one.name.endswith(METADATA_SUFFIXES):
            if (one.size or 0) > MOST_METADATA_BYTES:
                raise HubError(
                    f"{repo.text}: {one.name} has {one.size} bytes, more than {MOST_METADATA_BYTES}."
                )
            yield one


def is_weights(name: str) -> bool:
    """Also the index, without whose files a folder is not whole."""
    return name.endswith((WEIGHT_SUFFIX, f"{WEIGHT_SUFFIX}.index.json"))


# ---------------------------------------------------------------- files


def download(repo: Repo, listed: Listed, is_new: bool) -> None:
    """Have a file in the cache, with the size that the listing has, and if it is downloaded now with its hash."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = Path(hf_hub_download(repo.name, listed.name, repo_type=repo.kind, revision=repo.commit))
    except HfHubHTTPError as error:
        status = _status(error)
        raise (NetworkError if _may_pass(status) else HubError)(
            f"{repo.text}: {listed.name} cannot be downloaded, the hub answers with status {status}.{_login(status)}"
        ) from error
    except Exception as error:
        kind = NetworkError
        if isinstance(error, OSError) and error.errno is not None:
            why = os.strerror(error.errno)
            if error.errno in CACHE_ERRORS:
                kind, why = HubError, f"{why}, in {error.filename or cache_folder()}"
        elif "Consistency check failed" in str(error):
            why = f"what came has not the {listed.size} bytes that it should have"
        else:
            why = type(error.__cause__ or error).__name__
        raise kind(
            f"{repo.text}: {listed.name} could not be downloaded: {why}. The same command goes on where it ended."
        ) from error
    folder = snapshot_folder(repo)
    if path != folder / listed.name:
        raise HubError(f"{repo.text}: {listed.name} is in {path}; needed: {folder}. Set HF_HUB_CACHE.")
    size = path.stat().st_size
    wrong = listed.size is not None and size != listed.size
    if not wrong and is_new and listed.sha256 is not None:
        with path.open("rb") as file:
            wrong = hashlib.file_digest(file, "sha256").hexdigest() != listed.sha256
    if wrong:
        if is_new:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        what = (
            f"has {size} bytes, the hub says {listed.size}" if size != listed.size else "has another SHA-256"
        )
        change = "It was removed; start again" if is_new else f"Remove {path.resolve()} and start again"
        raise HubError(f"{repo.text}: {listed.name} is damaged: it {what}. {change}.")


def cache_folder() -> Path:
    """The cache of huggingface_hub, found as that does, without importing it."""
    variables = os.environ
    place = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE")
    if not place:
        caches = variables.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        place = os.path.join(variables.get("HF_HOME") or os.path.join(caches, "huggingface"), "hub")
    return Path(os.path.expanduser(os.path.expandvars(place)))


def repo_folder(kind: str, name: str) -> Path:
    """Where the cache has a "model" or a "dataset"."""
    return cache_folder() / f"{kind}s--{name.replace('/', '--')}"


def snapshot_folder(repo: Repo) -> Path:
    """Where the cache has a commit's files."""
    return repo_folder(repo.kind, repo.name) / "snapshots" / repo.commit


def _check_space(repo: Repo, files: Sequence[Listed]) -> None:
    size, place = sum(one.size or 0 for one in files), cache_folder()
    if not files:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise HubError(
            f"{repo.text}: the cache {place} cannot be written: {error.strerror}. Set HF_HOME."
        ) from error
    if free < size + FREE_BYTES:
        raise HubError(
            f"{repo.text}: {size / 1e9:.2f} GB are to be downloaded, and the disk of {place} has {free / 1e9:.2f} GB "
            "free. Make room, or set HF_HOME to a folder on another disk."
        )


def _note_revision(repo: Repo) -> None:
    """In the cache, what the revision stands for, as huggingface_hub notes it; without it the cache would not be found
    where the hub gives no answer."""
    path = repo_folder(repo.kind, repo.name) / "refs" / (repo.revision or "main")
    try:
        if path.is_file() and (not repo.is_new or path.read_text() == repo.commit):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(repo.commit)
        scratch.replace(path)
    except OSError:
        pass  # a cache that others own can be read all the same


# ---------------------------------------------------------------- without the hub


def _cached_commit(repo: Repo) -> str | None:
    if repo.commit:
        return repo.commit
    if _COMMIT.fullmatch(repo.revision):
        return repo.revision
    try:
        path = repo_folder(repo.kind, repo.name) / "refs" / (repo.revision or "main")
        commit = path.read_text().strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _check_cached(repo: Repo, folder: Path, why: UnreachableError, weights: bool) -> None:
    """HubError where a file that is needed is not in the cache, as far as that is known without a listing."""
    if repo.kind == "dataset":
        missing = [] if (folder / repo.file).is_file() else [repo.file]
    else:
        missing = [] if (folder / "config.json").is_file() else ["config.json"]
        if not missing and weights:
            missing = [name for name in _weight_names(folder) if not (folder / name).is_file()]
    if missing:
        raise _not_cached(repo, why, missing)


def _weight_names(folder: Path) -> list[str]:
    """As the index names them, or that of a single file."""
    try:
        index = json.loads((folder / f"model{WEIGHT_SUFFIX}.index.json").read_bytes())
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        there = [path.name for path in folder.glob(f"*{WEIGHT_SUFFIX}")]
        return there or [f"model{WEIGHT_SUFFIX}"]


def _not_cached(repo: Repo, why: UnreachableError, missing: Sequence[str] = ()) -> HubError:
    what = f"{', '.join(missing[:3])} of it" if missing else "it"
    return (HubError if why.is_wanted else NetworkError)(
        f"{repo.text}: the hub cannot be asked ({why}), and {what} is not in the cache {cache_folder()}. Where there "
        f'is a network run "{repo.command}" with the same HF_HOME, or give a local folder.'
    )


# ---------------------------------------------------------------- push


def push(name: str, folder: str, message: str) -> str:
    """Upload a folder to a model's repository, which is made, private, where there is none; the commit."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except HfHubHTTPError as error:
        status = _status(error)
        kind = NetworkError if _may_pass(status) else HubError
        raise kind(f"the hub refuses with status {status}.{_login(status)}") from error
    except Exception as error:
        raise NetworkError(f"{type(error).__name__} while it was sent") from error
    return str(done.oid or "")[:40]


def _status(error: Any) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _may_pass(status: int) -> bool:
    """Whether a status says that the hub fails, or has too much to do; another one refuses."""
    return status >= 500 or status in (408, 429)


def _login(status: int) -> str:
    return " Log in with `hf auth login`, or set HF_TOKEN." if status in (401, 403) else ""


def end_with(parent: int) -> None:
    """This process is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    found = answer(json.load(sys.stdin))
    with os.fdopen(out, "w") as stream:
        json.dump(found, stream)
