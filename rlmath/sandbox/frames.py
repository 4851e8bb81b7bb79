"""Frames on a channel: the length, big-endian in four bytes, and as many bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

LENGTH_BYTES = 4
_REPLY = struct.Struct(">IBQ")
_REQUEST = struct.Struct(">IQ")
REPLY_STATUSES = ("ok", "error", "denied", "memory")
"""The statuses that a sandbox itself may say; all others are judged from outside."""


def framed(payload: bytes) -> bytes:
    """A frame.

    >>> framed(b"ab")
    b'\\x00\\x00\\x00\\x02ab'
    """
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameBuffer:
    """Bytes of a channel, cut into frames; holds no more than a frame and what was read behind it.

    >>> buffer = FrameBuffer(most_bytes=10)
    >>> buffer.add(b"\\x00\\x00\\x00\\x02a"), buffer.add(b"b"), buffer.take(), buffer.take()
    (None, None, b'ab', None)
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def add(self, part: bytes) -> None:
        self._bytes += part

    def take(self) -> bytes | None:
        """The next complete frame's payload, None where there is none yet.

        ValueError for one that is too long."""
        if len(self._bytes) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
        if length > self._most_bytes:
            raise ValueError(f"a frame of {length} bytes; at most {self._most_bytes} are read")
        end = LENGTH_BYTES + length
        if len(self._bytes) < end:
            return None
        payload = bytes(self._bytes[LENGTH_BYTES:end])
        del self._bytes[:end]
        return payload


@dataclass(frozen=True)
class Reply:
    """A sandbox's reply to a call, all of which its code could have made up.

    >>> decoded_reply(encoded_reply(Reply(3, "ok", 0, "1")), most_characters=10)
    Reply(number=3, status='ok', dropped_characters=0, text='1')
    """

    number: int
    """The call's number in its completion."""
    status: str
    """One of REPLY_STATUSES."""
    dropped_characters: int
    """Characters that the sandbox did not keep, between the first half of `text` and the second."""
    text: str
    """The printed text; where characters were dropped, the first and the last
    `Limits.output_characters`."""


def encoded_reply(reply: Reply) -> bytes:
    header = _REPLY.pack(reply.number, REPLY_STATUSES.index(reply.status), reply.dropped_characters)
    return header + reply.text.encode("utf-8", "replace")


def decoded_reply(payload: bytes, most_characters: int) -> Reply:
    """The reply in a payload.

    ValueError for anything that is no reply with a text of at most twice as many characters."""
    if len(payload) < _REPLY.size:
        raise ValueError(f"a reply of {len(payload)} bytes")
    number, status, dropped = _REPLY.unpack_from(payload)
    text = payload[_REPLY.size :].decode("utf-8", "strict")
    if status >= len(REPLY_STATUSES) or len(text) > 2 * most_characters:
        raise ValueError(f"a reply of status {status} with {len(text)} characters")
    if dropped and len(text) != 2 * most_characters:
        raise ValueError(f"a reply that dropped characters and has {len(text)}")
    return Reply(number, REPLY_STATUSES[status], dropped, text=text)


def most_reply_bytes(output_characters: int) -> int:
    """Size of the longest reply: the first and the last characters, in UTF-8."""
    return _REPLY.size + 2 * 4 * output_characters


def encoded_request(number: int, seed: int, code: str) -> bytes:
    """A call as it is sent to a sandbox; `seed` is of 64 bits."""
    return _REQUEST.pack(number, seed) + code.encode("utf-8", "surrogatepass")


def decoded_request(payload: bytes) -> tuple[int, int, str]:
    """(number, seed, code) of a request's payload."""
    number, seed = _REQUEST.unpack_from(payload)
    return number, seed, payload[_REQUEST.size :].decode("utf-8", "surrogatepass")
