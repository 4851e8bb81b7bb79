"""This run's own values in torch's key-value store, which whoever reaches its port can read, write and delete.

Every value is JSON under an HMAC-SHA256 of its key and itself. A value that no rank of this run has signed is ignored,
with one warning; it is never unpickled, never ends the run, and its owner soon writes the right one again. Keys of one
start, rollout or process group have a name of their own before them, so that an old value cannot be put in the place
of a new one. No counter of torch's (`add`) is used: what cannot be signed could be set to anything, and a text in its
place makes the store close the connection of whoever adds to it.

The secret never passes through the store (docs/clusters.md says what it protects from and what not):

    before the process group is there   RLMATH_STORE_SECRET, or else, on one node, a file that only its user can read
    afterwards                          a random one from rank 0 over the process group, mixed with RLMATH_STORE_SECRET

Without a secret (several nodes, no variable, before the process group is there) only the form of values is checked.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import json
import logging
import os
import random
import secrets
import stat
import tempfile
import time
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from rlmath.config.terminal import excerpt

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT")

SECRET_VARIABLE = "RLMATH_STORE_SECRET"
MOST_BYTES = 4 * 2**20
"""A longer value is not ours, and is not parsed."""
MOST_ATTEMPTS = 200
"""How often a value that strangers keep changing is tried to be replaced."""
FIRST_PAUSE, LONGEST_PAUSE = 0.004, 0.25
"""Seconds of a rank that others of this run were faster than, before it adds to a counter again: between 0 and the
first, which is doubled every time."""
_TAG = 16
"""Bytes of the HMAC that are kept, before the JSON."""
_ABSENT = "\0absent"
"""What `compare_set` returns for a key that is not there."""


class SignedStore:
    """Values by key, of this run only. RuntimeError (torch's) where the store does not answer."""

    def __init__(self, store: dist.Store, name: str, secret: bytes = b"") -> None:
        """`name` comes before all keys; the HMAC covers it. Not for several threads at once, as torch's stores."""
        self._store, self._name, self._secret = store, name, secret
        self._nonce = secrets.token_hex(4)
        self._random = random.SystemRandom()  # Python's shared generator is the run's, which checkpoints save
        self._counters: dict[str, tuple[int, bytes]] = {}
        """The number that was last written to each counter here, and the value with it."""
        self._foreign: set[str] = set()
        """Full keys at which a foreign value was found."""

    def under(self, name: str) -> SignedStore:
        """The values whose keys begin with `name` too."""
        inner = SignedStore(self._store, f"{self._name}/{name}", self._secret)
        inner._foreign = self._foreign
        return inner

    @property
    def found_foreign(self) -> bool:
        """Whether any value was ignored."""
        return bool(self._foreign)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._full(key), self._signed(key, value))

    def get(self, key: str, foreign: Any = None) -> Any:
        """The value; None where there is none, `foreign` where another than this run's is there. Never waits."""
        found = self._peek(key)
        if found is None:
            return None
        value = self._verified(key, found)
        return foreign if value is None else value

    def get_all(self, keys: Sequence[str]) -> dict[str, Any]:
        """The values that are there, by key: two requests where all are."""
        if not keys:
            return {}
        if self._store.check([self._full(key) for key in keys]):
            found = self._store.multi_get([self._full(key) for key in keys])
            values = {key: self._verified(key, one) for key, one in zip(keys, found, strict=True)}
        else:
            values = {key: self.get(key) for key in keys}
        return {key: value for key, value in values.items() if value is not None}

    def all_there(self, keys: Sequence[str]) -> bool:
        """Whether there is something at all keys, this run's or not: one request."""
        return self._store.check([self._full(key) for key in keys])

    def set_first(self, key: str, value: Any) -> Any:
        """Set the value if none of this run is there; the one that is there then, of whichever rank."""
        wanted, full = self._signed(key, value), self._full(key)
        for _ in range(MOST_ATTEMPTS):
            found = self._store.compare_set(full, b"", wanted)  # type: ignore[arg-type]
            if found == wanted:
                return value
            there = self._verified(key, found)
            if there is not None:
                return there
        return value

    def fetch_add(self, key: str, amount: int = 1) -> int:
        """Add to a counter that all ranks share; returns what it was before, at first 0.

        No two ranks get the same number, however many add at once. Only where a stranger changes the counter they may.
        Waits where others add at the same time (FIRST_PAUSE).
        """
        number, expected = self._counters.get(key, (0, b""))
        slower = disturbed = 0
        while disturbed < MOST_ATTEMPTS:
            # With a nonce of this rank: what another one has written would else look like this rank's success.
            wanted = self._signed(key, [number + amount, self._nonce])
            found = self._store.compare_set(self._full(key), expected, wanted)  # type: ignore[arg-type]
            if found == wanted:
                break
            there = None if found in (b"", expected) else self._verified(key, found)
            if isinstance(there, list) and there[0] > number:  # another rank has added since
                number, expected, slower = there[0], found, slower + 1
                self._pause(slower)
            else:  # deleted, and torch returned what was expected; an older value; or a foreign one, which is removed
                expected, disturbed = (b"" if there is None else found), disturbed + 1
        self._counters[key] = number + amount, wanted
        return number

    def _pause(self, slower: int) -> None:
        """After every second time that others were faster: the attempt after a pause only reads the new value."""
        if slower % 2 == 0:
            longest = FIRST_PAUSE * 2.0 ** (slower // 2 - 1)
            time.sleep(self._random.uniform(0.0, min(longest, LONGEST_PAUSE)))

    def delete(self, key: str) -> None:
        self._store.delete_key(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _signed(self, key: str, value: Any) -> bytes:
        content = json.dumps(value).encode()
        return self._tag(key, content) + content

    def _tag(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, f"{self._full(key)}\0".encode() + content, "sha256")[:_TAG]

    def _peek(self, key: str) -> bytes | None:
        # `get` would wait for a key that is deleted after a `check`.
        found = self._store.compare_set(self._full(key), _ABSENT, _ABSENT)
        return None if found in (b"", _ABSENT.encode()) else found

    def _verified(self, key: str, found: bytes) -> Any:
        """The value; None where this run has not written it: then it is removed, with a warning."""
        tag, content = found[:_TAG], found[_TAG:]
        if len(found) <= MOST_BYTES and hmac.compare_digest(tag, self._tag(key, content)):
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(content)
        if found:
            self._warn(key, found)
            # Only if it is still there: its owner may have written the right one. Empty is as good as not there.
            self._store.compare_set(self._full(key), found, b"")  # type: ignore[arg-type]
        return None

    def _warn(self, key: str, found: bytes) -> None:
        log = logger.debug if self._foreign else logger.warning
        self._foreign.add(self._full(key))
        log(
            "The run's key-value store holds a value at %s that no rank of this run has written: it is ignored, as "
            "are all others of this kind (docs/clusters.md, Trusted network). %d bytes: %s",
            excerpt(self._full(key)),
            len(found),
            excerpt(found[:400]),
        )


def record_of(record_class: type[RecordT], value: Any) -> RecordT | None:
    """The dataclass of a JSON object that has exactly its fields, with values of their types; None for another one."""
    names = {field.name for field in fields(record_class)}  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.keys() != names:
        return None
    hints = typing.get_type_hints(record_class)
    return record_class(**value) if all(_fits(hints[name], value[name]) for name in names) else None


def _fits(kind: Any, value: Any) -> bool:
    parts, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is typing.Literal:
        return value in parts
    if origin in (types.UnionType, typing.Union):
        return any(_fits(part, value) for part in parts)
    if origin is Mapping:
        return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


# ---------------------------------------------------------------- the secret


def environment_secret() -> bytes:
    """RLMATH_STORE_SECRET; empty where it is not set."""
    return os.environ.get(SECRET_VARIABLE, "").encode("utf-8", "surrogateescape")


def start_secret(several_nodes: bool) -> bytes:
    """What the ranks of a start share before they have a process group; empty on several nodes without the variable.

    OSError where this rank cannot have it: without it none of the ranks would believe another.
    """
    given = environment_secret()
    if given or several_nodes:
        return given
    try:
        return _shared_file(_secret_path())
    except OSError as error:
        raise OSError(
            f"the ranks of a node share the secret of their key-value store by a file in the temporary folder, which "
            f"this rank cannot read or write: {error}. Free space there, or set TMPDIR to another folder, or "
            f"{SECRET_VARIABLE} to a random text, the same for all ranks"
        ) from error


def remove_start_secret() -> None:
    """Remove the file of `start_secret`, when all ranks have read it."""
    with contextlib.suppress(OSError):
        _secret_path().unlink(missing_ok=True)


def _secret_path() -> Path:
    run = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    name = hashlib.sha256("\0".join(run).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"rlmath-store-{os.getuid()}-{name}"


def _shared_file(path: Path) -> bytes:
    """What the first process of this user wrote there; nobody else can read it. Removed when one of them ends."""
    atexit.register(remove_start_secret)
    with contextlib.suppress(FileNotFoundError):
        return _read_own(path)
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.unlink(missing_ok=True)
    try:
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # whole at once, and the first one stays
        return _read_own(path)
    finally:
        own.unlink(missing_ok=True)


def _read_own(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"it belongs to another user, or others may read it: {found}")
        return file.read(64)
