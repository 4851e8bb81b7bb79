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
    """What the user is told of a server that is not to be trusted."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request; `error` in it says what is wrong, `may_pass` whether it is the hub or the network."""
    try:
        _distrust_server()
        return _push(request) if request["action"] == "push" else _fetch(request)
    except ImportError as error:
        text = f"huggingface_hub is missing or broken ({error}). Install it: rlmath install cpu (or gpu)."
        may_pass = False
    except Exception as error:  # of the HTTP library, whose classes are not huggingface_hub's
        text, may_pass = _told(request, error)
    return {"error": f"{request['text']}: {text}", "may_pass": may_pass}


def _push(request: Mapping[str, Any]) -> dict[str, Any]:
    from huggingface_hub import HfApi

    name, message = request["name"], request["message"]
    HfApi().create_repo(name, private=True, exist_ok=True)
    done = HfApi().upload_folder(repo_id=name, folder_path=request["folder"], commit_message=message)
    return {"commit": str(done.oid or "")[:40]}


def _fetch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Have what is asked for in the cache: its commit, and bytes of weights that were not there at the beginning."""
    from huggingface_hub import snapshot_download

    is_model = not request["file"]
    wanted = METADATA_PATTERNS if is_model else [glob.escape(request["file"])]
    options: dict[str, Any] = {
        "repo_id": request["name"],
        "repo_type": "model" if is_model else "dataset",
        "revision": request["commit"] or request["revision"] or None,
        "ignore_patterns": FOLDERS if is_model else None,
    }
    listed = []
    with suppress(Exception):  # without a listing nothing is downloaded either
        patterns = [*wanted, *WEIGHT_PATTERNS] if is_model else wanted
        listed = snapshot_download(dry_run=True, allow_patterns=patterns, **options)
    most = max([MIN_FILE_BYTES, *(one.file_size or 0 for one in listed)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    _remove_stale_parts(options)
    if is_model and request["weights"]:
        wanted = [*wanted, *WEIGHT_PATTERNS]
    folder = Path(snapshot_download(allow_patterns=wanted, **options))
    if request["file"] and not (folder / request["file"]).is_file():
        text = f'{request["text"]}: there is no file "{request["file"]}" in it. Look at its files on the hub.'
        return {"error": text, "may_pass": False}
    lacking = [one for one in listed if one.will_download and one.filename.endswith(".safetensors")]
    return {"commit": folder.name, "missing_bytes": sum(one.file_size or 0 for one in lacking)}


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


def _remove_stale_parts(options: Mapping[str, Any]) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=options["repo_id"], repo_type=options["repo_type"])
    for part in Path(HF_HUB_CACHE, folder, "blobs").glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > STALE_SECONDS:
                part.unlink()


def _told(request: Mapping[str, Any], error: Exception) -> tuple[str, bool]:
    """What a user is told of an error of huggingface_hub or of the network, and whether it may pass."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    is_missing = isinstance(error, LocalEntryNotFoundError)
    cause = error.__cause__ if is_missing and error.__cause__ is not None else error
    if isinstance(cause, HubError):
        return str(cause), False
    status = int(getattr(getattr(cause, "response", None), "status_code", 0) or 0)
    why = type(cause).__name__ + (f", status {status}" if status else "")
    if status and status < 500 and status not in (408, 429):
        return (
            f"the hub refuses it ({why}). Correct the name or the revision, accept its terms on its page, or log in "
            "with `hf auth login` or HF_TOKEN.",
            False,
        )
    if isinstance(cause, OSError) and cause.errno in CACHE_ERRORS and not is_missing:
        return f"the cache cannot be written ({cause.strerror}). Set HF_HOME.", False
    may_pass = not isinstance(cause, OfflineModeIsEnabled)
    if request["action"] == "push":
        return f"the hub cannot be asked ({why}).", may_pass
    words = f"hf download {request['name']}" + (
        f" {request['file']} --repo-type dataset" if request["file"] else ""
    )
    if revision := request["commit"] or request["revision"]:
        words += f" --revision {revision}"
    return (
        f"it could not be downloaded ({why}), and is not, or not whole, in the cache. The same command goes on with "
        f'what is missing. Or run "{words}" where there is a network, with the same HF_HOME, or give a local folder.',
        may_pass,
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
