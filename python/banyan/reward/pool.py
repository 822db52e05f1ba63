"""The pool of reward workers: a thread that hands out jobs and keeps the clock.

    submit -> pending -> [worker: starting -> idle <-> busy] -> results -> collect

Workers are started as jobs need them, up to the limit. A worker that overruns, dies or breaks the
protocol is killed with its process group and replaced when the next job needs it; its job gets a
failed result. Nobody waits for the others. Every wait is bounded: a worker must be ready within
_START_S, a job must end within timeout_s.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import IO, Any

from banyan.errors import UserError
from banyan.reward import wire
from banyan.reward.process import WorkerProcess
from banyan.reward.result import ScoreResult, failure, from_answer

_START_S = 120.0  # loading the user's file: imports included
_TICK_S = 0.5  # how often silent workers are looked at
_MAX_FAILED_STARTS = 3  # in a row


@dataclass
class Job:
    id: int
    key: Hashable
    frame: bytes


@dataclass
class _Worker:
    process: WorkerProcess
    deadline: float
    ready: bool = False
    job: Job | None = None


class Pool:
    """Thread-safe for one submitting and collecting thread."""

    def __init__(self, settings: dict[str, Any], num_workers: int, log: IO[bytes] | int) -> None:
        """Starts one worker and waits until its scorer is loaded.

        Raises:
            UserError: [reward] with the reason why the scorer cannot be loaded.
        """
        self._settings = settings
        self._timeout_s = float(settings["timeout_s"])
        self._num_workers = num_workers
        self._log = log
        self._changed = threading.Condition()
        self._pending: deque[Job] = deque()
        self._results: dict[int, tuple[Hashable, ScoreResult]] = {}
        self._outstanding = 0
        self._next_id = 0
        self._stop = False
        self._error: BaseException | None = None
        self._failed_starts = 0
        self._start_reason: str | None = None
        self._started = False
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._ended())
        if not self._started:
            reason = self._start_reason or repr(self._error)
            self.close()
            raise UserError(f"[reward] the reward function cannot be loaded: {reason}")

    def submit(self, key: Hashable, job: dict[str, Any]) -> None:
        """Queues a job and returns at once. Raises TypeError if it has no JSON form."""
        with self._changed:
            self._pending.append(Job(self._next_id, key, wire.encode({"id": self._next_id, **job})))
            self._next_id += 1
            self._outstanding += 1
        self._wake()

    def collect(self) -> list[tuple[Hashable, ScoreResult]]:
        """Waits for everything submitted; results in the order of submission."""
        with self._changed:
            while len(self._results) < self._outstanding and not self._ended():
                self._changed.wait(timeout=1.0)  # bounded, so that Ctrl-C is seen
            if self._error is not None:
                raise RuntimeError("[reward] the pool's thread failed") from self._error
            results = [self._results[i] for i in sorted(self._results)]
            self._results.clear()
            self._outstanding = 0
        return results

    def close(self) -> None:
        """Ends all workers. Safe to call twice."""
        if self._thread.is_alive():
            self._stop = True
            self._wake()
            self._thread.join()
        for fd in (self._wake_in, self._wake_out):
            if fd >= 0:
                os.close(fd)
        self._wake_in = self._wake_out = -1

    def pids(self) -> list[int]:
        """Process ids of the workers at this moment."""
        return [worker.process.pid for worker in list(self._workers)]

    def _ended(self) -> bool:
        return not self._thread.is_alive() or self._error is not None or self._stop

    def _wake(self) -> None:
        os.write(self._wake_in, b"x")

    # --- the pool's thread ---

    def _run(self) -> None:
        try:
            self._start_worker()
            while not self._stop:
                self._assign()
                for key, _ in self._selector.select(self._wait_s()):
                    if key.data is None:
                        os.read(self._wake_out, 1 << 12)
                    elif key.data in self._workers:
                        key.data.process.flush()
                        self._hear(key.data)
                self._look_at_clocks()
        except BaseException as error:  # told to the waiting thread
            self._error = error
        finally:
            for worker in list(self._workers):
                self._bury(worker)
            self._selector.close()
            with self._changed:
                self._changed.notify_all()

    def _wait_s(self) -> float:
        deadlines = [w.deadline for w in self._workers if w.job or not w.ready]
        if not deadlines:
            return 60.0
        return min(_TICK_S, max(0.0, min(deadlines) - time.monotonic()))

    def _start_worker(self) -> None:
        worker = _Worker(WorkerProcess(self._settings, self._log), time.monotonic() + _START_S)
        self._workers.append(worker)
        self._watch(worker)

    def _watch(self, worker: _Worker) -> None:
        """Watches the answers, and the jobs' pipe while bytes wait for it."""
        for fd, event, wanted in [
            (worker.process.answers_fd, selectors.EVENT_READ, True),
            (worker.process.jobs_fd, selectors.EVENT_WRITE, worker.process.wants_write),
        ]:
            watched = fd in self._selector.get_map()
            if wanted and not watched:
                self._selector.register(fd, event, worker)
            elif watched and not wanted:
                self._selector.unregister(fd)

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.ready and worker.job is None and self._pending:
                with self._changed:
                    worker.job = self._pending.popleft()
                worker.deadline = time.monotonic() + self._timeout_s
                worker.process.send(worker.job.frame)
            self._watch(worker)
        starting = sum(not worker.ready for worker in self._workers)
        room = self._num_workers - len(self._workers)
        for _ in range(min(room, len(self._pending) - starting)):
            self._start_worker()

    def _hear(self, worker: _Worker) -> None:
        try:
            for message in worker.process.receive():
                self._take(worker, message)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._end(worker, "invalid", f"the worker broke the protocol: {error}")
            return
        if worker.process.closed:
            self._end(worker, "killed", None)

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        if not worker.ready:
            if "failed" in message:
                self._start_reason = str(message["failed"])
                return  # the worker ends by itself now
            worker.ready = True
            self._failed_starts = 0
            with self._changed:
                self._started = True
                self._changed.notify_all()
            return
        if worker.job is None or message["id"] != worker.job.id:
            raise ValueError("an answer without a question")
        if "answer" in message:
            result = from_answer(message["answer"])
        else:
            status = message["status"]
            if status not in ("error", "invalid"):
                raise ValueError(f"status {status!r}")
            result = failure(status, str(message["reason"]))
        self._settle(worker, result)

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.job is None and worker.ready:
                continue
            if now > worker.deadline:
                limit = self._timeout_s if worker.ready else _START_S
                self._end(worker, "timeout", f"no answer within {limit:g} s")
            elif worker.process.is_dead():  # its children may hold the pipe open
                self._hear(worker)
                if worker in self._workers and (worker.job or not worker.ready):
                    self._end(worker, "killed", None)

    def _end(self, worker: _Worker, status: str, what: str | None) -> None:
        """Kills a worker; its job, or its failure to start, gets the reason."""
        ending = self._bury(worker)
        what = what or f"the worker died ({ending})"
        if worker.job is not None:
            self._settle(worker, failure(status, what))
        if worker.ready:
            return
        self._failed_starts += 1
        self._start_reason = self._start_reason or what
        if not self._started:
            self._stop = True
        elif self._failed_starts >= _MAX_FAILED_STARTS:
            self._failed_starts = 0
            self._fail_pending(f"workers do not start: {self._start_reason}")

    def _bury(self, worker: _Worker) -> str:
        for fd in (worker.process.answers_fd, worker.process.jobs_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        self._workers.remove(worker)
        return worker.process.kill()

    def _settle(self, worker: _Worker, result: ScoreResult) -> None:
        job, worker.job = worker.job, None
        assert job is not None
        with self._changed:
            self._results[job.id] = (job.key, result)
            self._changed.notify_all()

    def _fail_pending(self, what: str) -> None:
        with self._changed:
            for job in self._pending:
                self._results[job.id] = (job.key, failure("error", what))
            self._pending.clear()
            self._changed.notify_all()
