"""An engine with the interface of the binding and scripted tokens: the server is tested without a model.

`script(request, index)` gives the token ids that a response would have if nothing stopped it. A thread draws one token
per pass for every running response, obeys stops and max_tokens as the real engine does, and makes up log-probabilities
that are a function of (token, position), so that two runs of a request agree.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

Request = dict[str, Any]
# What the binding takes where a request gives nothing.
_DEFAULTS = {
    "max_tokens": 0,
    "min_tokens": 0,
    "eos_ids": [],
    "stop_token_ids": [],
    "stop": [],
    "ignore_eos": False,
}
_DEFAULTS |= {"top_logprobs": -1, "prompt_logprobs": -1, "return_sampling_mask": False}
_COUNTERS = dict.fromkeys(
    ("prompt_tokens", "prompt_tokens_cached", "preemptions", "dropped_groups"), 0
)
_COUNTERS |= {
    "prefix_cache_queries": 5,
    "prefix_cache_hits": 2,
    "passes": 3,
    "pass_tokens": 7,
    "evicted_pages": 4,
}


class RequestError(ValueError):
    """As banyan._C.RequestError."""

    def __init__(self, code: int, param: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.param, self.message, self.retry_after = code, param, message, retry_after


def logprob(token: int, position: int) -> float:
    return -((token * 7 + position * 13) % 97 + 1) / 32


class _Response:
    def __init__(self, request: Request, index: int, tokens: Sequence[int]) -> None:
        self.request, self.index, self.script = request, index, list(tokens)
        self.ids: list[int] = []


class FakeEngine:
    """Counts what is asked of it: `aborted`, `calls`."""

    def __init__(
        self,
        script: Callable[[Request, int], Sequence[int]],
        token_bytes: Sequence[bytes],
        vocab: int,
        pass_seconds: float = 0.0,
        max_queued: int = 0,
    ) -> None:
        self.script, self.vocab, self.pass_seconds = script, vocab, pass_seconds
        self.max_queued = max_queued
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.state = "stopped"
        self.error = ""  # every response fails with it
        self.version = "v0"
        self.epoch = 0
        self._bytes = token_bytes
        self._running: list[_Response] = []
        self._gone: list[_Response] = []  # aborted
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Condition()
        self._read, self._write = os.pipe()
        self._generated = 0

    # --- service -------------------------------------------------------------------------------------------
    def start(self) -> None:
        self.state = "running"
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        self.abort([])
        with self._lock:
            self.state = "stopped"
            self._lock.notify_all()
        self._thread.join(timeout)

    def submit(self, request: Request) -> str:
        request = {**request, "params": {**_DEFAULTS, **request["params"]}}
        self._check(request)
        with self._lock:
            if self.state == "paused":
                raise RequestError(503, "", "[rollout] paused: no new requests", 1.0)
            if self.max_queued and len(self._running) >= self.max_queued:
                raise RequestError(503, "", "[rollout] queue: full", 2.0)
            self.requests.append(request)
            for index in range(request["n"]):
                tokens = self.script(request, index)
                self._running.append(_Response(request, index, tokens))
            self._lock.notify_all()
        return request["id"]

    def drain(self) -> list[dict[str, Any]]:
        with self._lock:
            found, self._events = self._events, []
            if found:
                os.read(self._read, 1)
            return found

    def event_fd(self) -> int:
        return self._read

    def abort(self, ids: list[str]) -> int:
        with self._lock:
            gone = [r for r in self._running if not ids or r.request["id"] in ids]
            self._running = [r for r in self._running if r not in gone]
            self._gone += gone  # their last events come with the next pass
            self._lock.notify_all()
            names = {response.request["id"] for response in gone}
            self.aborted += sorted(names)
            return len(names)

    # --- control -------------------------------------------------------------------------------------------
    def pause(self, mode: str, timeout: float) -> None:
        self.calls.append(("pause", mode, timeout))
        self.state = "paused"

    def resume(self) -> None:
        self.calls.append(("resume",))
        with self._lock:
            self.state = "running"
            self._lock.notify_all()

    def sleep(self, level: int, mode: str, timeout: float) -> int:
        self.calls.append(("sleep", level, mode, timeout))
        self.state = "asleep"
        return 4096

    def wake(self, tags: list[str]) -> list[str]:
        self.calls.append(("wake", tags))
        left = [] if not tags or "kv_cache" in tags else ["kv_cache"]
        if not left:
            self.resume()
        return left

    def update_weights_from_disk(
        self, directory: str, version: str, keep: bool, timeout: float
    ) -> None:
        self.calls.append(("update_weights_from_disk", directory, version, keep, timeout))
        if not os.path.isdir(directory):
            raise RequestError(400, "model_path", "[weights] directory: wanted a directory")
        self.version, self.epoch = version, self.epoch + 1

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def reset_prefix_cache(self, retract_running: bool) -> None:
        self.calls.append(("reset_prefix_cache", retract_running))

    def weight_checksums(self) -> dict[str, str]:
        return {"model.embed_tokens.weight": "00ff"}

    def stats(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "running": len(self._running),
            "waiting": 0,
            "groups_running": len({r.request["id"] for r in self._running}),
            "num_pages": 100,
            "used_pages": len(self._running),
            "cached_pages": 0,
            "weight_epoch": self.epoch,
            "weight_version": self.version,
            "weights_missing": False,
            "counters": {**_COUNTERS, "generation_tokens": self._generated},
            "seconds": {"forward": 0.5},
        }

    # --- drawing -------------------------------------------------------------------------------------------
    def _check(self, request: Request) -> None:
        if any(not 0 <= token < self.vocab for token in request["prompt"]):
            raise RequestError(400, "prompt", "[rollout] prompt: token id out of range")
        params = request["params"]
        if params["max_tokens"] == 0 and params["prompt_logprobs"] < 0:
            raise RequestError(400, "max_tokens", "[rollout] max_tokens: wanted >= 1")

    def _loop(self) -> None:
        while self.state != "stopped":
            with self._lock:
                for response in self._gone:
                    self._emit(self._event(response, [], "abort"))
                self._gone.clear()
                if not self._running or self.state != "running":
                    self._lock.wait(0.05)
                    continue
                for response in list(self._running):
                    self._draw(response)
            if self.pass_seconds:
                threading.Event().wait(self.pass_seconds)

    def _draw(self, response: _Response) -> None:
        if self.error:
            self._running.remove(response)
            self._emit({**self._event(response, [], "abort"), "finish": None, "error": self.error})
            return
        params = response.request["params"]
        new = []
        finish, stop_token, stop_string = None, None, None
        if params["max_tokens"] == 0:
            finish = "length"
        else:
            token = response.script[len(response.ids) % len(response.script)]
            response.ids.append(token)
            new = [token]
            self._generated += 1
            early = len(response.ids) < params["min_tokens"]
            if token in params["eos_ids"] and not params["ignore_eos"] and not early:
                finish = "stop"
            elif token in params["stop_token_ids"] and not early:
                finish, stop_token = "stop", token
            elif len(response.ids) >= params["max_tokens"]:
                finish = "length"
            elif not early:
                stop_string = self._stop_string(response)
                finish = "stop" if stop_string is not None else None
        if finish:
            self._running.remove(response)
        self._emit(self._event(response, new, finish, stop_token, stop_string))

    def _stop_string(self, response: _Response) -> int | None:
        text = b"".join(self._bytes[id] for id in response.ids)
        before = len(text) - len(self._bytes[response.ids[-1]])
        for number, stop in enumerate(response.request["params"]["stop"]):
            if text.find(stop, max(0, before - len(stop) + 1)) >= 0:
                return number
        return None

    def _event(
        self,
        response: _Response,
        new: list[int],
        finish: str | None,
        stop_token: int | None = None,
        stop_string: int | None = None,
    ) -> dict[str, Any]:
        params, prompt = response.request["params"], response.request["prompt"]
        places = range(len(response.ids) - len(new), len(response.ids))
        raw = [logprob(id, place) for id, place in zip(new, places, strict=True)]
        top = None
        if params.get("top_logprobs", -1) >= 0:
            top = [self._top(id, place, params) for id, place in zip(new, places, strict=True)]
        scored = None
        if finish and params.get("prompt_logprobs", -1) >= 0:
            count = {"top_logprobs": params["prompt_logprobs"]}
            scored = [
                self._top(id, place, count) if place else [] for place, id in enumerate(prompt)
            ]
        event = {
            "request": response.request["id"],
            "index": response.index,
            "tokens": new,
            "raw": raw,
            "processed": [value / 2 for value in raw],
            "log_kept_mass": [-0.25] * len(new),
            "top": top,
            "sampling_mask": [[id] for id in new] if params.get("return_sampling_mask") else None,
            "finished": finish is not None,
        }
        if finish is None:
            return event
        return event | {
            "finish": finish,
            "stop_token": stop_token,
            "stop_string": stop_string,
            "error": "",
            "prompt_tokens": len(prompt),
            "cached_tokens": len(prompt) // 2,
            "num_retractions": 0,
            "queue_seconds": 0.0,
            "spans": [
                {"epoch": self.epoch, "version": self.version, "start": 0, "end": len(response.ids)}
            ],
            "prompt_logprobs": scored,
        }

    def _top(self, token: int, place: int, params: dict[str, Any]) -> list[tuple[int, float, int]]:
        value = logprob(token, place)
        count = min(params["top_logprobs"], 5)
        likeliest = [(rank, -rank / 64, rank + 1) for rank in range(count)]
        asked = [(id, logprob(id, place), 40) for id in params.get("logprob_token_ids", [])]
        return [(token, value, 50), *likeliest, *asked]

    def _emit(self, event: dict[str, Any]) -> None:
        if not self._events:
            os.write(self._write, b"x")
        self._events.append(event)
