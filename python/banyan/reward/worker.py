"""A reward worker: one process, one job at a time, ended by the trainer when a job takes too long.

Started as `python -m banyan.reward.worker SETTINGS` with two pipes, its standard input and output.
They are moved away before user code runs, so nothing that is printed there can reach the wire. The
first message says that the scorer is loaded, or why not; each following one answers one job.

Limits set here: address space, size of a written file, open files, CPU seconds of a job, no core
dump, no new privileges, and death with the trainer.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
from typing import Any

from banyan.reward import loading, wire

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CPU_SLACK_S = 5
_MAX_OPEN_FILES = 1024
_MAX_FILE_BYTES = 256 << 20


def main() -> None:
    settings = json.loads(sys.argv[1])
    jobs, answers = _take_pipes()
    _limit(settings["memory_limit_bytes"])
    try:
        compute_score = loading.load(settings["path"], settings["name"], settings["reward_kwargs"])
    except BaseException as error:  # a user's file may raise anything, SystemExit included
        _send(answers, {"failed": _describe(error)})
        return
    _send(answers, {"ready": True})
    reader = wire.Reader(wire.MAX_JOB_BYTES)
    while data := os.read(jobs, 1 << 16):
        reader.feed(data)
        while (job := reader.next()) is not None:
            _limit_cpu(settings["timeout_s"])
            _send(answers, {"id": job.pop("id"), **_answer(compute_score, job)})


def _take_pipes() -> tuple[int, int]:
    """Moves the pipes off fd 0 and 1; input becomes empty, output goes where errors go."""
    jobs, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return jobs, answers


def _limit(memory_bytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for what, wanted in limits.items():
        hard = resource.getrlimit(what)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(what, (limit, limit))


def _limit_cpu(timeout_s: float) -> None:
    """The trainer's clock ends a job; this one holds even if the trainer is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    threads = os.cpu_count() or 1
    limit = math.ceil(used.ru_utime + used.ru_stime + threads * timeout_s) + _CPU_SLACK_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _answer(compute_score: loading.ComputeScore, job: dict[str, Any]) -> dict[str, Any]:
    """{"answer": what the scorer returned} or {"status", "reason"}."""
    try:
        answer = compute_score(**job)
    except Exception as error:
        return {"status": "error", "reason": _describe(error)}
    except SystemExit as error:
        return {"status": "error", "reason": _describe(error)}
    try:
        size = len(wire.encode(answer))
    except (TypeError, ValueError, RecursionError) as error:
        what = f"wanted a number or a mapping with score, got {type(answer).__name__}: {error}"
        return {"status": "invalid", "reason": what}
    if size > wire.MAX_RESULT_BYTES // 2:
        what = f"wanted at most {wire.MAX_RESULT_BYTES // 2} bytes, got a result of {size}"
        return {"status": "invalid", "reason": what}
    return {"answer": answer}


def _describe(error: BaseException) -> str:
    """Type, text and the line of the user's code that raised."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(os.path.dirname(__file__)) and "importlib" not in file:
            where = f" ({os.path.basename(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[:2000] + where


def _send(fd: int, message: dict[str, Any]) -> None:
    data = wire.encode(message)
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
