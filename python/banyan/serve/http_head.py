"""Checks the head of an HTTP/1.1 request before the parser sees it. A pure function of bytes, so it can be fuzzed.

    request line CRLF *( header ":" value CRLF ) CRLF body

What h11 takes and two servers could read differently is refused here: a repeated or signed Content-Length, a
Content-Length beside Transfer-Encoding, a coding other than `chunked`, folded lines, NUL. Sizes are the limits'. The
grammar itself stays with h11.
"""

from __future__ import annotations

import re

from banyan.serve.limits import Limits

_END = re.compile(rb"\n\r?\n")
_DIGITS = re.compile(rb"[0-9]{1,18}")


class HeadError(Exception):
    """A head that is refused: status and a text for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def check_head(data: bytes, limits: Limits) -> bool:
    """Checks what has come of a head; true once it is whole. Raises HeadError."""
    found = _END.search(data, 0, limits.head_bytes + 1)
    head = data[: found.start()] if found else data[: limits.head_bytes + 1]
    line, _, rest = head.partition(b"\n")
    if len(line) > limits.header_line_bytes:
        raise HeadError(414, f"request line: wanted <= {limits.header_line_bytes} bytes")
    if not found:
        if len(data) > limits.head_bytes:
            raise HeadError(431, f"request head: wanted <= {limits.head_bytes} bytes")
        return False
    if not line.rstrip(b"\r").endswith((b" HTTP/1.1", b" HTTP/1.0")):
        raise HeadError(400, "request line: wanted METHOD TARGET HTTP/1.1")
    _check_headers(rest.split(b"\n") if rest else [], limits)
    if b"\0" in head:
        raise HeadError(400, "request head: wanted no NUL byte")
    return True


def _check_headers(lines: list[bytes], limits: Limits) -> None:
    if len(lines) > limits.num_headers:
        raise HeadError(431, f"headers: wanted <= {limits.num_headers}, got {len(lines)}")
    lengths: list[bytes] = []
    codings: list[bytes] = []
    for line in lines:
        if len(line) > limits.header_line_bytes:
            raise HeadError(431, f"header line: wanted <= {limits.header_line_bytes} bytes")
        if line[:1] in (b" ", b"\t"):
            raise HeadError(400, "header line: wanted no folded lines")
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            lengths.append(value.strip())
        elif name.lower() == b"transfer-encoding":
            codings.append(value.strip().lower())
    _check_framing(lengths, codings, limits)


def _check_framing(lengths: list[bytes], codings: list[bytes], limits: Limits) -> None:
    if lengths and codings:
        raise HeadError(400, "wanted Content-Length or Transfer-Encoding, got both")
    if len(lengths) > 1 or len(codings) > 1:
        raise HeadError(400, "Content-Length, Transfer-Encoding: wanted once, got it repeated")
    if codings and codings[0] != b"chunked":
        raise HeadError(400, "Transfer-Encoding: wanted chunked")
    if lengths and not _DIGITS.fullmatch(lengths[0]):
        raise HeadError(400, "Content-Length: wanted 1 to 18 digits")
    if lengths and int(lengths[0]) > limits.body_bytes:
        raise HeadError(413, f"body: wanted <= {limits.body_bytes} bytes, got {int(lengths[0])}")
