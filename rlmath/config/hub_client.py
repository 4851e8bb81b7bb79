"""The program that talks to the Hugging Face hub, in a process of its own: `hub` starts it and ends it in time.

    python -P hub_client.py PARENT   with a request in JSON on standard input, and the answer in JSON on standard output

It imports huggingface_hub and nothing of rlmath. Locks and the cache are huggingface_hub's. A server is not trusted: of
its answer nothing but the status is repeated in a message, what huggingface_hub makes paths of are plain names, and
listings and files are bounded.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

METADATA_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]
"""A model's configuration, tokenizer and the index of its weights."""
WEIGHT_PATTERNS = ["*.safetensors"]
"""No other format of weights is ever fetched: the others run code when they are read."""
FOLDERS = ["*/*"]
"""What lies in folders of a model's repository is not fetched."""
CACHE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of the disk that has the cache, which the user can mend; any other may be the network's, and pass."""
MAX_LISTING_BYTES = 2**26
"""Of all listings that one answer takes."""
MIN_FILE_BYTES = 2**26
"""Any file may have so many; a larger one at most as many as the largest that is listed and asked for."""
STALE_SECONDS = 3600.0
"""A part of a file that has not grown for so long is of a download that was ended: it is removed, and begins anew."""
_NAMES = ("sha", "oid", "etag", "x-linked-etag", "x-repo-commit")
"""What huggingface_hub makes names of files and folders of, in listings and headers."""
_PLAIN = re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9._:-]{0,199}"?')
_PR_SET_PDEATHSIG = 1


class HubError(Exception):
    """What the user is told; `may_pass`: the hub or the network fails, so that the same command may succeed later."""

    def __init__(self, text: str, may_pass: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request; `error` in it says what is wrong, and `may_pass` whether it is the network."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        _distrust_server()
        if request["action"] == "push":
            api = HfApi()
            api.create_repo(request["name"], private=True, exist_ok=True)
            done = api.upload_folder(
                repo_id=request["name"], folder_path=request["folder"], commit_message=request["message"]
            )
            return {"commit": str(done.oid or "")[:40]}
        is_model = not request["file"]
        wanted = METADATA_PATTERNS if is_model else [glob.escape(request["file"])]
        options: dict[str, Any] = {
            "repo_type": "model" if is_model else "dataset",
            "revision": request["commit"] or request["revision"] or None,
            "ignore_patterns": FOLDERS if is_model else None,
        }
        if is_model and request["weights"]:
            wanted = [*wanted, *WEIGHT_PATTERNS]
        _remove_stale_parts(request["name"], options["repo_type"])
        _bound_files(request["name"], {"allow_patterns": wanted, **options})
        folder = Path(snapshot_download(request["name"], allow_patterns=wanted, **options))
        _check_complete(request, folder)
        left: list[int] = []
        if request["count_weights"]:
            options |= {"revision": folder.name, "allow_patterns": WEIGHT_PATTERNS}
            with suppress(DryRunError):  # without a network, where the cache has no listing
                found = snapshot_download(request["name"], dry_run=True, **options)
                left = [one.file_size or 0 for one in found if one.will_download]
        return {"commit": folder.name, "left": len(left), "left_bytes": sum(left)}
    except HubError as error:
        told = error
    except Exception as error:  # of the HTTP library, whose classes are not huggingface_hub's
        told = _told(request, error)
    return {"error": str(told), "may_pass": told.may_pass}


def _distrust_server() -> None:
    """From now on every answer of a server is looked at before huggingface_hub sees it."""
    import httpx2
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    received = 0

    class Bounded(httpx2.SyncByteStream):
        def __init__(self, stream: httpx2.SyncByteStream) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            nonlocal received
            for part in self._stream:
                received += len(part)
                if received > MAX_LISTING_BYTES:
                    raise HubError(f"the hub's listings have more than {MAX_LISTING_BYTES} bytes")
                yield part

        def close(self) -> None:
            self._stream.close()

    def look_at(response: httpx2.Response) -> None:
        if response.request.method == "HEAD":
            _check_names({name: value for name, value in response.headers.items() if name in _NAMES})
        elif "/api/" in response.url.path or not response.is_success:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise HubError("the hub sends a compressed listing, which was not asked for")
            response.stream = Bounded(response.stream)  # pyright: ignore[reportArgumentType]
            response.read()
            if response.is_success and "json" in response.headers.get("content-type", ""):
                _check_names(response.json())

    def client() -> httpx2.Client:
        made = default_client_factory()
        made.event_hooks = {**made.event_hooks, "response": [look_at]}
        made.headers["Accept-Encoding"] = "identity"
        return made

    set_client_factory(client)


def _check_names(listing: Any) -> None:
    """HubError for a name in a listing or in headers that is more than a name."""
    for value in listing if isinstance(listing, list) else ():
        _check_names(value)
    for name, value in listing.items() if isinstance(listing, dict) else ():
        if name in _NAMES and not (isinstance(value, str) and _PLAIN.fullmatch(value)):
            raise HubError(f"the hub gives a name that is none ({name}), of which no file is made")
        _check_names(value)


def _bound_files(name: str, wanted: Mapping[str, Any]) -> None:
    """No file of this process becomes longer than the largest that is listed of those that are `wanted`."""
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.utils import filter_repo_objects

    patterns = {key: wanted[key] for key in ("allow_patterns", "ignore_patterns")}
    most = MIN_FILE_BYTES
    with suppress(Exception):  # without a listing nothing is downloaded either
        where = {"revision": wanted["revision"], "repo_type": wanted["repo_type"]}
        HfApi().repo_info(
            name, **where
        )  # asked once: a listing is asked for again and again where there is no hub
        listed = HfApi().list_repo_tree(name, recursive=True, **where)
        files = [one for one in listed if isinstance(one, RepoFile)]
        found = filter_repo_objects(files, key=lambda one: one.path, **patterns)
        most = max([most, *(one.size for one in found)])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _remove_stale_parts(name: str, repo_type: str) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"{repo_type}s--{name.replace('/', '--')}" / "blobs"
    for part in blobs.glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > STALE_SECONDS:
                part.unlink()


def _check_complete(request: Mapping[str, Any], folder: Path) -> None:
    """HubError where the commit has not what is needed of it."""
    from huggingface_hub import HfApi

    text, name = request["text"], request["name"]
    if request["file"]:
        if not (folder / request["file"]).is_file():
            names = HfApi().list_repo_files(name, repo_type="dataset", revision=folder.name)
            there = [one for one in names if one.endswith(tuple(request["suffixes"]))]
            more = ", ..." if there[6:] else ""
            raise HubError(
                f'{text}: {name} has no file "{request["file"]}". It has {", ".join(there[:6])}{more}.'
            )
    elif not (folder / "config.json").is_file():
        raise HubError(f"{text}: {name} has no config.json; needed: a model in the Hugging Face format.")
    elif request["weights"] and not list(folder.glob("*.safetensors")):
        raise HubError(f"{text}: {name} has no weights in safetensors, the only format that is downloaded.")


def _told(request: Mapping[str, Any], error: Exception) -> HubError:
    """What a user is told of an error of huggingface_hub or of the network."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    text, name = request["text"], request["name"]
    is_missing = isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled)
    cause = error.__cause__ if is_missing and error.__cause__ is not None else error
    if isinstance(cause, HubError):
        return HubError(f"{text}: {cause}")
    status = int(getattr(getattr(cause, "response", None), "status_code", 0) or 0)
    if isinstance(cause, GatedRepoError):
        return HubError(
            f"{text}: the hub gives {name} only to those who have accepted its terms. Accept them on its page, and "
            "log in there with `hf auth login` or HF_TOKEN."
        )
    if isinstance(cause, RevisionNotFoundError):
        revision = request["commit"] or request["revision"]
        return HubError(
            f'{text}: {name} has no revision "{revision}". Give a branch, a tag or a commit of it.'
        )
    if isinstance(cause, RepositoryNotFoundError):
        kind = "data set" if request.get("file") else "model"
        return HubError(
            f"{text}: the hub has no {kind} {name}, or it is private and the token may not read it (status "
            f"{status}). Correct the name, or log in with `hf auth login` or HF_TOKEN."
        )
    if status and status < 500 and status not in (408, 429):
        login = " Log in with `hf auth login`, or set HF_TOKEN." if status in (401, 403) else ""
        return HubError(f"{text}: the hub refuses with status {status}.{login}")
    if isinstance(cause, OSError) and cause.errno in CACHE_ERRORS and not is_missing:
        place = f", in {cause.filename}" if cause.filename else ""
        return HubError(f"{text}: the cache cannot be written: {cause.strerror}{place}. Set HF_HOME.")
    is_offline = isinstance(cause, OfflineModeIsEnabled)
    why = f"it answers with status {status}" if status else f"no answer ({type(cause).__name__})"
    why = "HF_HUB_OFFLINE is set" if is_offline else why
    if request["action"] == "push":
        return HubError(f"{text}: the hub cannot be asked ({why}).", may_pass=not is_offline)
    if not is_missing:
        return HubError(
            f"{text}: could not be downloaded ({type(cause).__name__}). The same command goes on with what is missing.",
            may_pass=True,
        )
    words = ["hf download", name, *([f"{request['file']} --repo-type dataset"] if request["file"] else ())]
    if revision := request["commit"] or request["revision"]:
        words.append(f"--revision {revision}")
    return HubError(
        f"{text}: the hub cannot be asked ({why}), and it is not, or not whole, in the cache. Where there is a network "
        f'run "{" ".join(words)}" with the same HF_HOME, or give a local folder.',
        may_pass=not is_offline,
    )


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
