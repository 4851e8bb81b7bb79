"""Program that asks the Hugging Face hub for one thing.

`hub` kills its process at the time limit: the timeouts of huggingface_hub bound a single read, and
no download.

    python -P hub_client.py PARENT   with a request in JSON on standard input, and the answer in JSON on standard output

It imports huggingface_hub, whose are the locks, the cache and all checks of what a server sends,
and nothing of rlmath.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

CACHE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of the cache's disk, which the user can mend.

Any other may be the network's, and pass."""
STALE_SECONDS = 3600.0
"""Seconds without growth after which a part of a file is of a download that was killed.

No other download goes on with it."""
_PR_SET_PDEATHSIG = 1


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request.

    It has the `commit` that was downloaded or made, or an `error`, and in `may_pass` whether the
    hub or the network failed."""
    try:
        return {"commit": _push(**request["push"]) if "push" in request else _download(request)}
    except Exception as error:  # of the HTTP library, whose classes are not huggingface_hub's
        text, may_pass = _explained(error, request["advice"])
        return {"error": f"{request['name']}: {text}", "may_pass": may_pass}


def _push(repo_id: str, folder_path: str, commit_message: str) -> str:
    """Upload a folder to a repository, made if it is not there, and return the commit."""
    from huggingface_hub import HfApi

    HfApi().create_repo(repo_id, private=True, exist_ok=True)
    commit_info = HfApi().upload_folder(
        repo_id=repo_id, folder_path=folder_path, commit_message=commit_message
    )
    return str(commit_info.oid or "")[:40]


def _download(request: Mapping[str, Any]) -> str:
    """Have files in the cache.

    Nothing is asked over the network where a commit's are all there."""
    from huggingface_hub import snapshot_download

    for part in Path(request["blobs"]).glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > STALE_SECONDS:
                part.unlink()
    return Path(snapshot_download(**request["download"])).name


def _explained(error: Exception, advice: str) -> tuple[str, bool]:
    """The text that a user is told of an error, and whether the error may pass.

    Nothing that a server has written is repeated."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
    reason = type(error).__name__ + (f", status {status}" if status else "")
    if 400 <= status < 500 and status not in (408, 429):
        text = (
            f"the hub refuses it ({reason}). Correct the name or the revision, accept its terms "
            "on its page, or log in "
            "with `hf auth login` or HF_TOKEN."
        )
        return text, False
    if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
        return f"the cache cannot be written ({error.strerror}). Set HF_HOME.", False
    return f"the hub cannot be asked ({reason}){advice}", not isinstance(
        error, OfflineModeIsEnabled
    )


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # this process is killed when its parent ends
    if os.getppid() != int(sys.argv[1]):
        sys.exit("its parent has ended")
    with redirect_stdout(sys.stderr):  # what a library prints is no answer
        answered = answer(json.load(sys.stdin))
    json.dump(answered, sys.stdout)
