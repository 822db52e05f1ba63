"""SGLang's dialect, which `banyan serve` speaks too.

| step | route | where it is missing |
|---|---|---|
| identify, ready | GET /server_info, /model_info; /ready | /get_server_info, /get_model_info; /health (older) |
| generate | POST /generate with input_ids and return_logprob | not an SGLang server |
| abort | POST /abort_request | the requests' connections are closed |
| weights | POST /pause_generation, /update_weights_from_disk, /flush_cache, /continue_generation | an error |
| memory | POST /release_memory_occupation, /resume_memory_occupation | an error |
| load | GET /v1/loads | requests in flight from here |

Without `--schedule-policy lpm` the copies of a prompt are prefilled one by one, so a request of no tokens comes first.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from banyan.drivers.http import ServerError, wanted
from banyan.drivers.server import (
    LOAD_SECONDS,
    Answer,
    Ask,
    Facts,
    Server,
    check_answer,
    numbers,
    spans,
    token_ids,
)

_SEED_BITS = 0x7FFFFFFF


class SglangServer(Server):
    """One SGLang server."""

    _ready_path = "/ready"
    _info_path = "/model_info"

    async def identify(self) -> Facts:
        info, _ = await self._first("/server_info", "/get_server_info")
        model, self._info_path = await self._first("/model_info", "/get_model_info")
        await self.find_routes()
        if self.routes is not None and "/ready" not in self.routes:
            self._ready_path = "/health"
        self.needs_warm_prompt = info.get("schedule_policy", "fcfs") == "fcfs" and (
            info.get("engine") != "banyan"
        )
        name = "banyan" if info.get("engine") == "banyan" else "SGLang"
        length = info.get("context_length") or info.get("max_model_len")
        return Facts(
            f"{name} {info.get('version', '')}".strip(),
            str(model.get("model_path", "")),
            length if isinstance(length, int) else None,
        )

    async def is_ready(self) -> bool:
        if await self.address.is_up(self._ready_path):
            return True
        return self._ready_path != "/health" and await self.address.is_up("/health")

    async def generate(self, ask: Ask) -> Answer:
        body = {
            "rid": ask.id,
            "input_ids": ask.tokens,
            "sampling_params": self._sampling(ask),
            "return_logprob": True,
            "stream": False,
        }
        if len(ask.tokens) > ask.prompt_tokens:
            body["resume"] = {"prompt_len": ask.prompt_tokens}
        reply = await self.address.post("/generate", body, deadline=self.limits.request_timeout)
        what = f"POST {self.url}/generate"
        meta = wanted(what, wanted(what, reply, dict, "body").get("meta_info"), dict, "meta_info")
        ids = token_ids(what, reply.get("output_ids"), "output_ids")
        entries = wanted(
            what, meta.get("output_token_logprobs"), list, "meta_info.output_token_logprobs"
        )
        for entry in entries:
            if len(wanted(what, entry, list, "output_token_logprobs[]")) < 2:
                raise ServerError(
                    f"{what}: output_token_logprobs[]: wanted [logprob, id, text], got {entry}"
                )
        if [entry[1] for entry in entries] != ids:
            raise ServerError(
                f"{what}: wanted log-probabilities of the returned ids, got {len(entries)} of others"
            )
        finish = wanted(what, meta.get("finish_reason"), dict, "meta_info.finish_reason")
        answer = Answer(
            tokens=ids,
            logprobs=numbers(what, [entry[0] for entry in entries], "output_token_logprobs"),
            finish=str(finish.get("type")),
            cached_tokens=meta.get("cached_tokens") or 0,
            spans=spans(what, meta.get("weight_versions", meta.get("weight_version")), len(ids)),
        )
        return check_answer(what, ask, answer)

    async def warm(self, ask: Ask) -> None:
        params = {**self._sampling(ask), "max_new_tokens": 0}
        body = {"rid": f"{ask.id}-warm", "input_ids": ask.tokens, "sampling_params": params}
        await self.address.post("/generate", body, deadline=self.limits.request_timeout)

    async def abort(self, ids: list[str]) -> None:
        if self.routes is not None and "/abort_request" in self.routes:
            for rid in ids:
                await self.control.post("/abort_request", {"rid": rid})

    async def pause(self) -> None:
        await self.control.post("/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        await self.control.post("/continue_generation", {}, again=False)

    async def put_weights(self, directory: str, version: str) -> None:
        # The cache of a server without KV pages cannot be flushed; drop_cache() comes after they are back.
        body = {
            "model_path": directory,
            "flush_cache": not self.asleep,
            "weight_version": version,
        }
        reply = await self.control.post(
            "/update_weights_from_disk", body, deadline=self.limits.request_timeout, again=False
        )
        what = f"POST {self.control.url}/update_weights_from_disk"
        if not wanted(what, reply, dict, "body").get("success"):
            raise ServerError(f"{what}: wanted success, got {reply.get('message', reply)}")
        await self._check_label(version)

    async def sleep(self, with_weights: bool) -> None:
        tags = ["kv_cache", "weights"] if with_weights else ["kv_cache"]
        await self.control.post("/release_memory_occupation", {"tags": tags})

    async def wake(self, what: str) -> None:
        await self.control.post(
            "/resume_memory_occupation", {"tags": [what]}, deadline=self.limits.request_timeout
        )

    async def load(self) -> int | None:
        if not self.lists("/v1/loads"):
            return None
        body = await self.address.get("/v1/loads", deadline=LOAD_SECONDS, again=False)
        loads = body.get("loads", [body]) if isinstance(body, dict) else body
        if not isinstance(loads, list):
            return None
        found = 0
        for item in loads:
            counts = [item.get(key) for key in ("num_running_reqs", "num_waiting_reqs")]
            if not all(isinstance(count, int) for count in counts):
                return None
            found += sum(counts)
        return found

    # --- inside ------------------------------------------------------------------------------------------------

    async def _first(self, path: str, older: str) -> tuple[dict[str, Any], str]:
        """The body of the first of two routes that is there."""
        for route in (path, older):
            try:
                body = await self.address.get(route)
            except ServerError as error:
                if error.status != 404 or route == older:
                    hint = "; wanted an SGLang server (rollout.name=sglang)" if error.status else ""
                    raise ServerError(f"{error}{hint}", error.status) from error
                continue
            return wanted(f"GET {self.url}{route}", body, dict, "body"), route
        return {}, path

    def _sampling(self, ask: Ask) -> dict[str, Any]:
        params = ask.params
        sampling = {
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "top_k": params["top_k"] if params["top_k"] > 0 else -1,  # 0 is refused
            "repetition_penalty": params.get("repetition_penalty", 1.0),
            "presence_penalty": params.get("presence_penalty", 0.0),
            "frequency_penalty": params.get("frequency_penalty", 0.0),
            "sampling_seed": ask.seed & _SEED_BITS,
            "max_new_tokens": ask.max_tokens,
            "min_new_tokens": params.get("min_tokens", 0),
            "ignore_eos": params["ignore_eos"],
            "stop_token_ids": [] if params["ignore_eos"] else list(params["eos_ids"]),
        }
        if params.get("min_p", 0.0) > 0.0:  # SGLang takes none beside a seed
            sampling["min_p"] = params["min_p"]
        return sampling

    async def drop_cache(self) -> None:
        """Until the cache is dropped: 400 while something still runs or another flush is on."""
        path = "/flush_cache?timeout=60"
        until = time.monotonic() + max(self.limits.timeout, 60.0)
        while True:
            try:
                await self.control.post(path, deadline=max(self.limits.timeout, 60.0) + 5.0)
                return
            except ServerError as error:
                if error.status != 400 or time.monotonic() > until:
                    raise
            await asyncio.sleep(self.limits.retry_delay)

    async def _check_label(self, version: str) -> None:
        info = await self.address.get(self._info_path)
        found = info.get("weight_version") if isinstance(info, dict) else None
        if found is not None and str(found) != version:
            raise ServerError(
                f"GET {self.url}{self._info_path}: wanted weight_version {version}, got {found}"
            )
