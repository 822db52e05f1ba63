"""A server that plays vLLM or SGLang over real sockets, and every way in which one can fail.

`law(prompt, max_tokens, seed, id)` says what it generates: (ids, log-probabilities). Faults are queued per path and
used up one per call: answers of any status, black holes, cut connections, delays; `Partial` under "tokens".
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Answered:
    """Any status with a body, before the route is reached."""

    status: int
    text: str = '{"error": {"message": "scripted"}}'
    headers: tuple[tuple[str, str], ...] = ()


def busy(retry_after: float | None = None) -> Answered:
    headers = (("Retry-After", str(retry_after)),) if retry_after is not None else ()
    return Answered(503, '{"error": {"message": "paused"}}', headers)


BLACK_HOLE = "black hole"  # takes the request and never answers
CUT = "cut"  # closes the connection in the middle of an answer
BAD_JSON = Answered(200, '{"choices": [')


@dataclass(frozen=True)
class Partial:
    """The generation is aborted after so many tokens."""

    tokens: int


def toy_law(prompt: list[int], max_tokens: int, seed: int, name: str) -> tuple[list[int], list]:
    """Tokens that depend on everything; log-probabilities that depend on the token alone."""
    ids = [(len(prompt) + place * 7 + seed) % 50 + 3 for place in range(max_tokens)]
    return ids, [toy_logprob(token) for token in ids]


def toy_logprob(token: int) -> float:
    return -0.25 - 0.01 * token


class ScriptedServer:
    """Use as a context; `url` is its address, `calls` what it was asked: (method, path, body)."""

    def __init__(self, dialect="vllm", law=toy_law, missing=(), load=None, **state: Any) -> None:
        self.dialect, self.law, self.missing = dialect, law, set(missing)
        self.calls: list[tuple[str, str, Any]] = []
        self.faults: dict[str, list[Any]] = defaultdict(list)
        self.on_load = load or (lambda directory: None)  # called with each directory of weights
        self.state = {
            "label": "default",
            "follows_labels": True,  # False: goes on with the old label, as a server that missed an update
            "paused": False,
            "asleep": set(),
            "max_model_len": 4096,
            "policy": "fcfs",
            "load": 0,
            "key": None,
            "spans": True,
            **state,
        }
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    def __enter__(self) -> ScriptedServer:
        handler = type("Handler", (_Handler,), {"script": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)

    def asked(self, path: str) -> list[Any]:
        """Bodies of the calls to a path."""
        return [body for _, where, body in self.calls if urlsplit(where).path == path]

    def order(self) -> list[str]:
        """Paths of the control calls, in order."""
        return [
            where for method, where, _ in self.calls if method == "POST" and "enerate" not in where
        ]

    def routes(self) -> dict[str, Any]:
        common = {
            "/health": self.ok,
            "/openapi.json": self.openapi,
            "/is_sleeping": lambda *_: {"is_sleeping": bool(self.state["asleep"])},
        }
        own = {"vllm": self.vllm_routes, "sglang": self.sglang_routes}[self.dialect]()
        return {path: call for path, call in (common | own).items() if path not in self.missing}

    def ok(self, *_: Any) -> Any:
        return {}

    def openapi(self, *_: Any) -> Any:
        return {"paths": {path: {} for path in self.routes()}}

    # --- vLLM --------------------------------------------------------------------------------------------------

    def vllm_routes(self) -> dict[str, Any]:
        return {
            "/version": lambda *_: {"version": "0.33.0"},
            "/v1/models": lambda *_: {
                "data": [{"id": "served", "max_model_len": self.state["max_model_len"]}]
            },
            "/inference/v1/generate": self.vllm_generate,
            "/v1/completions": self.vllm_complete,
            "/abort_requests": lambda *_: {"status": "aborted"},
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.vllm_load,
            "/reset_prefix_cache": lambda *_: {"success": True},
            "/update_weight_version": self.vllm_label,
            "/weight_info": lambda *_: {"weight_version": self.state["label"]},
            "/sleep": lambda query, _: self.sleep(int(query["level"][0])),
            "/wake_up": lambda query, _: self.wake(query["tags"]),
            "/metrics": lambda *_: self.metrics(),
        }

    def metrics(self) -> str:
        load = self.state["load"]
        return (
            "# HELP vllm:num_requests_running Running.\n"
            f'vllm:num_requests_running{{engine="0",model_name="served"}} {load - 1 if load else 0}.0\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="served"}} {1 if load else 0}.0\n'
            'vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0\n'
        )

    def vllm_generate(self, query: Any, body: Any) -> Any:
        params = body["sampling_params"]
        ids, logprobs, finish = self.tokens(
            body["token_ids"], params["max_tokens"], params["seed"], body["request_id"]
        )
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}}
        spans = [{"version": self.state["label"], "start": 0, "end": len(ids)}]
        extra = {"weight_versions": spans} if self.state["spans"] else {}
        return {"choices": [{**choice, "finish_reason": finish, **extra}], "usage": {}}

    def vllm_complete(self, query: Any, body: Any) -> Any:
        ids, logprobs, finish = self.tokens(
            body["prompt"], body["max_tokens"], body["seed"], body["request_id"]
        )
        choice = {
            "index": 0,
            "text": "never looked at",
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": logprobs,
            },
            "finish_reason": finish,
        }
        cached = {"prompt_tokens_details": {"cached_tokens": 2}}
        return {"choices": [choice], "usage": cached}

    def vllm_load(self, query: Any, body: Any) -> Any:
        assert body["method"] == "reload_weights"
        self.on_load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def vllm_label(self, query: Any, body: Any) -> Any:
        if self.state["follows_labels"]:
            self.state["label"] = body["new_version"]
        return {"success": True, "new_version": body["new_version"]}

    # --- SGLang ------------------------------------------------------------------------------------------------

    def sglang_routes(self) -> dict[str, Any]:
        info = {"version": "0.5.23", "schedule_policy": self.state["policy"]}
        return {
            "/ready": self.ok,
            "/server_info": lambda *_: info,
            "/model_info": lambda *_: {
                "model_path": "served",
                "weight_version": self.state["label"],
            },
            "/generate": self.sglang_generate,
            "/abort_request": self.ok,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.sglang_load,
            "/flush_cache": self.ok,
            "/release_memory_occupation": lambda _, body: self.state["asleep"].update(body["tags"]),
            "/resume_memory_occupation": lambda _, body: self.wake(body["tags"]),
            "/v1/loads": lambda *_: {
                "loads": [{"num_running_reqs": self.state["load"], "num_waiting_reqs": 0}]
            },
        }

    def sglang_generate(self, query: Any, body: Any) -> Any:
        params = body["sampling_params"]
        if params["max_new_tokens"] == 0:
            return {"output_ids": [], "meta_info": {}}
        ids, logprobs, finish = self.tokens(
            body["input_ids"], params["max_new_tokens"], params["sampling_seed"], body["rid"]
        )
        pairs = [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)]
        meta = {
            "finish_reason": {"type": finish},
            "output_token_logprobs": pairs,
            "weight_version": self.state["label"],
            "cached_tokens": 0,
        }
        return {"output_ids": ids, "meta_info": meta}

    def sglang_load(self, query: Any, body: Any) -> Any:
        self.on_load(body["model_path"])
        if self.state["follows_labels"]:
            self.state["label"] = body["weight_version"]
        return {"success": True, "message": "", "num_paused_requests": 0}

    # --- both --------------------------------------------------------------------------------------------------

    def tokens(self, prompt: Any, budget: int, seed: int, name: str) -> tuple[list, list, str]:
        if self.state["paused"] or self.state["asleep"]:
            return [], [], "abort"
        ids, logprobs = self.law(prompt, budget, seed, name)
        fault = self.take("tokens")
        if isinstance(fault, Partial):
            return ids[: fault.tokens], logprobs[: fault.tokens], "abort"
        return ids, logprobs, "length" if len(ids) == budget else "stop"

    def pause(self, *_: Any) -> Any:
        self.state["paused"] = True
        return {"status": "paused"}

    def resume(self, *_: Any) -> Any:
        assert self.state["paused"], "resumed twice"
        self.state["paused"] = False
        return {"status": "resumed"}

    def sleep(self, level: int) -> Any:
        self.state["asleep"] |= {"kv_cache", "weights"}
        return {"status": "sleeping", "level": level}

    def wake(self, tags: Any) -> Any:
        self.state["asleep"] -= set(tags)
        return {"status": "awake"}

    def take(self, path: str) -> Any:
        with self.lock:
            return self.faults[path].pop(0) if self.faults[path] else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the script."""


class _Handler(BaseHTTPRequestHandler):
    script: ScriptedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits for an acknowledgement

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def answer(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        parts = urlsplit(self.path)
        script = self.script
        with script.lock:
            script.calls.append((method, self.path, body))
        key = script.state["key"]
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.reply(401, '{"error": "Unauthorized"}')
            return
        if self.fails(script.take(parts.path)):
            return
        route = script.routes().get(parts.path)
        if route is None:
            self.reply(404, '{"detail": "Not Found"}')
            return
        found = route(parse_qs(parts.query), body)
        self.reply(200, found if isinstance(found, str) else json.dumps(found))

    def fails(self, fault: Any) -> bool:
        """Plays a fault; True if that was the answer."""
        if fault is None:
            return False
        if fault == BLACK_HOLE:
            self.script.stopped.wait(30)
            self.close_connection = True
        elif fault == CUT:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choi')
            self.wfile.flush()
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif isinstance(fault, float):
            time.sleep(fault)
            return False
        else:
            self.reply(fault.status, fault.text, fault.headers)
        return True

    def reply(self, status: int, text: str, headers: Any = ()) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
