"""Every limit of the server, in one place; SECURITY.md carries the same table.

A limit that a library has by default is set here all the same: defaults are no design.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bytes, seconds and counts that a client cannot exceed."""

    # --- one request on the wire ---
    header_line_bytes: int = 8192  # 431; the request line: 414
    num_headers: int = 100  # 431
    head_bytes: int = 32768  # 431
    body_bytes: int = 8 * MIB  # 413, before anything is read
    discard_bytes: int = 64 * MIB  # of a refused body, read away so that the answer arrives
    # --- seconds ---
    header_seconds: float = 5.0  # from the first byte of a head to its end: 408
    body_seconds: float = 30.0  # from the head to the end of the body: 408
    write_seconds: float = 30.0  # a write that the client does not take: the connection is dropped
    idle_seconds: float = 60.0  # between requests, and before the first
    request_seconds: float = 3600.0  # a whole request: 408, its tokens are aborted
    linger_seconds: float = 2.0  # after a refusal
    # --- all requests together ---
    connections: int = 10240  # more: the longest idle one is closed, or 503
    bodies_bytes: int = 256 * MIB  # of all requests being read: 503
    waiting_requests: int = 1024  # not yet with the engine: 503
    # --- JSON ---
    json_depth: int = 64
    # --- parameters: 400 with the range ---
    n: int = 128
    prompts: int = 1024  # in one request
    sequences: int = 8192  # prompts times n
    logprobs: int = 20
    stop: int = 16
    stop_bytes: int = 256
    logit_bias: int = 300
    bad_words: int = 128
    listed_token_ids: int = 128  # of stop_token_ids, logprob_token_ids
    schema_bytes: int = 65536  # of a JSON schema, a regular expression, a list of choices
    label_bytes: int = 256  # of a request id, a cache salt, a user
    messages: int = 4096
    tools: int = 128
