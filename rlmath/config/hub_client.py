"""The program that talks to the Hugging Face hub, in a process of its own: `hub` starts it and ends it in time.

    python -P hub_client.py PARENT   with a request in JSON on standard input, and the answer in JSON on standard output

It imports huggingface_hub and nothing of rlmath. Locks and the cache are huggingface_hub's. No word of a server's is
repeated in a message, and no file becomes larger than the largest that is listed.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
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
MIN_FILE_BYTES = 2**26
"""Any file may have so many."""
STALE_SECONDS = 3600.0
"""A part of a file that has not grown for so long is of a download that was ended: it is removed, and begins anew."""
_PR_SET_PDEATHSIG = 1


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request; `error` in it says what is wrong, `may_pass` whether it is the hub or the network."""
    try:
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
    return (
        f"it could not be downloaded ({why}), and is not, or not whole, in the cache. The same command goes on with "
        "what is missing. Or run `hf download` where there is a network, or give a local folder.",
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
