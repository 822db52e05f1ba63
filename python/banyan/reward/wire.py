"""Messages between the trainer and a reward worker: 4 bytes of length, then that much JSON.

Torch-free, used on both sides. Neither side reads more than it agreed to: a length over the limit is
an error before anything is allocated.
"""

from __future__ import annotations

import json
import struct
from typing import Any

MAX_RESULT_BYTES = 64 << 10  # worker -> trainer
MAX_JOB_BYTES = 256 << 20  # trainer -> worker: a response and its row
_HEADER = struct.Struct("<I")


def encode(message: Any) -> bytes:
    """One frame. Values of numpy and pyarrow become plain ones; raises TypeError for others."""
    body = json.dumps(message, default=_plain).encode()
    return _HEADER.pack(len(body)) + body


def _plain(value: Any) -> Any:
    for method in ("item", "tolist", "as_py", "isoformat"):
        if hasattr(value, method) and (method != "item" or getattr(value, "size", 0) == 1):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


class Reader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> Any:
        """The next whole message, or None. Raises ValueError for a bad one."""
        if len(self._bytes) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._bytes)
        if length > self._max_bytes:
            raise ValueError(f"a message of {length} bytes, the limit is {self._max_bytes}")
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return json.loads(body)
