"""Compiles patterns to automata over tokens, in a process of its own that may be killed.

Run as a script, so that neither banyan nor torch is imported. Frames on both pipes are a length (4 bytes, little
endian) and that many bytes. First comes the vocabulary: for each id its length (2 bytes) and its bytes. Then jobs as
JSON, {"regex": text} or {"schema": text, "patterns": {constant: pattern}, "pattern_chars": limit}; each is answered by
b"T" and outlines_core's automaton as it serialises it, or by b"E" and a sentence.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys

# The folder of this script holds modules with common names.
if sys.path and not sys.flags.safe_path:
    del sys.path[0]

from outlines_core import Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

_ERROR_CHARS = 400


def read_frame() -> bytes | None:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    body = sys.stdin.buffer.read(length)
    return body if len(body) == length else None


def write_frame(body: bytes) -> None:
    sys.stdout.buffer.write(struct.pack("<I", len(body)) + body)
    sys.stdout.buffer.flush()


def read_vocabulary(frame: bytes) -> Vocabulary:
    """Ids of equal bytes belong together; the id after the last stands for the end of the text."""
    ids: dict[bytes, list[int]] = {}
    place, token = 0, 0
    while place < len(frame):
        (length,) = struct.unpack_from("<H", frame, place)
        text = frame[place + 2 : place + 2 + length]
        place += 2 + length
        if text:
            ids.setdefault(text, []).append(token)
        token += 1
    return Vocabulary(token, ids)


def compile_job(job: dict, vocabulary: Vocabulary) -> bytes:
    regex = job.get("regex")
    if regex is None:
        regex = build_regex_from_schema(job["schema"])
        for constant, pattern in job["patterns"].items():
            regex = regex.replace(constant, pattern)
        if len(regex) > job["pattern_chars"]:
            raise ValueError(
                f"the schema makes a pattern of {len(regex)} characters; wanted at most {job['pattern_chars']}"
            )
    return Index(regex, vocabulary).__reduce__()[1][0]


def main() -> None:
    os.nice(10)  # the engine computes on the same cores
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    frame = read_frame()
    if frame is None:
        return
    vocabulary = read_vocabulary(frame)
    write_frame(b"T")
    while (frame := read_frame()) is not None:
        signal.alarm(int(sys.argv[2]))  # ends this process should nobody be left to do it
        try:
            answer = b"T" + compile_job(json.loads(frame), vocabulary)
        except (ValueError, TypeError, MemoryError) as error:
            text = str(error).split("\n")[0] or type(error).__name__
            answer = b"E" + text[:_ERROR_CHARS].encode()
        write_frame(answer)
        signal.alarm(0)


if __name__ == "__main__":
    main()
