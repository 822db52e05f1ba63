"""vLLM's dialect, which `banyan serve` speaks too.

| step | route | where it is missing |
|---|---|---|
| identify, ready | GET /version, /openapi.json, /v1/models; /health | not a vLLM server |
| generate | POST /inference/v1/generate | POST /v1/completions with ids in and out |
| abort | POST /abort_requests | the requests' connections are closed |
| weights | POST /pause, /collective_rpc, /update_weight_version, /reset_prefix_cache, /resume | an error |
| memory | POST /sleep, /wake_up | an error |
| load | GET /metrics | requests in flight from here |

Every sampling parameter is sent: a server started without `--generation-config vllm` would else take its defaults from
the model's generation_config.json.
"""

from __future__ import annotations

import asyncio
import re
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

_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_NO_ROUTE = (403, 404, 405)
_QUEUES = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)


class VllmServer(Server):
    """One vLLM server."""

    _model = ""
    _is_banyan = False
    _route = _GENERATE

    async def identify(self) -> Facts:
        what = f"GET {self.url}/version"
        try:
            body = wanted(what, await self.address.get("/version"), dict, "body")
        except ServerError as error:
            if error.status == 404:
                raise ServerError(f"{error}; wanted a vLLM server (rollout.name=vllm)") from error
            raise
        version = wanted(what, body.get("version"), str, "version")
        self._is_banyan = body.get("engine") == "banyan"
        await self.find_routes()
        if not self.lists(_GENERATE):
            self._route = _COMPLETIONS
        models = await self.address.get("/v1/models")
        what = f"GET {self.url}/v1/models"
        served = wanted(what, wanted(what, models, dict, "body").get("data"), list, "data")
        if not served or not isinstance(served[0], dict):
            raise ServerError(f"{what}: wanted at least one model, got {served}")
        self._model = wanted(what, served[0].get("id"), str, "data[0].id")
        length = served[0].get("max_model_len")
        name = "banyan" if self._is_banyan else "vLLM"
        return Facts(f"{name} {version}", self._model, length if isinstance(length, int) else None)

    async def is_ready(self) -> bool:
        return await self.address.is_up("/health")

    async def generate(self, ask: Ask) -> Answer:
        if self._route == _GENERATE:
            try:
                return await self._generate_ids(ask)
            except ServerError as error:
                if error.status not in _NO_ROUTE:
                    raise
                self._route = _COMPLETIONS
                self.say(
                    f"rollout server {self.url}: {_GENERATE} is not there, {_COMPLETIONS} generates"
                )
        return await self._complete(ask)

    async def abort(self, ids: list[str]) -> None:
        if self.routes is not None and "/abort_requests" in self.routes:
            # vLLM knows a request under its route's spelling of the id; unknown ones are passed over.
            spelled = [s for id in ids for s in (id, f"generate-tokens-{id}", f"cmpl-{id}-0")]
            await self.control.post("/abort_requests", {"request_ids": spelled})

    async def pause(self) -> None:
        await self.control.post("/pause?mode=wait", deadline=self.limits.request_timeout)

    async def resume(self) -> None:
        await self.control.post("/resume", again=False)

    async def put_weights(self, directory: str, version: str) -> None:
        long = self.limits.request_timeout
        call = {"method": "reload_weights", "kwargs": {"weights_path": directory}, "timeout": long}
        await self.control.post("/collective_rpc", call, deadline=long, again=False)
        await self._label(version)

    async def sleep(self, with_weights: bool) -> None:
        await self.control.post(f"/sleep?level={2 if with_weights else 1}&mode=abort")

    async def wake(self, what: str) -> None:
        await self.control.post(f"/wake_up?tags={what}", deadline=self.limits.request_timeout)

    async def wake_as_it_was(self) -> None:
        await self.wake("weights")  # level 1 puts them to sleep too, where they are kept
        await self.wake("kv_cache")

    async def load(self) -> int | None:
        text = await self.address.get("/metrics", deadline=LOAD_SECONDS, again=False, as_text=True)
        counts = [float(number) for number in _QUEUES.findall(text)]
        return int(sum(counts)) if counts else None

    # --- inside ------------------------------------------------------------------------------------------------

    def _sampling(self, ask: Ask) -> dict[str, Any]:
        params = ask.params
        return {
            "n": 1,
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "top_k": max(params["top_k"], 0),
            "min_p": params.get("min_p", 0.0),
            "repetition_penalty": params.get("repetition_penalty", 1.0),
            "presence_penalty": params.get("presence_penalty", 0.0),
            "frequency_penalty": params.get("frequency_penalty", 0.0),
            "seed": ask.seed,
            "max_tokens": ask.max_tokens,
            "min_tokens": params.get("min_tokens", 0),
            "ignore_eos": params["ignore_eos"],
            # The run's own end-of-sequence ids: the server's may be fewer.
            "stop_token_ids": [] if params["ignore_eos"] else list(params["eos_ids"]),
            "logprobs": 0,
        }

    def _own_fields(self, ask: Ask) -> dict[str, Any]:
        """What only banyan's servers know."""
        if not self._is_banyan:
            return {}
        resumed = len(ask.tokens) > ask.prompt_tokens
        resume = {"resume": {"prompt_len": ask.prompt_tokens}} if resumed else {}
        return {"return_rl": True, "return_weight_versions": True, **resume}

    async def _generate_ids(self, ask: Ask) -> Answer:
        body = {
            "request_id": ask.id,
            "token_ids": ask.tokens,
            "sampling_params": self._sampling(ask),
            "stream": False,
            **self._own_fields(ask),
        }
        reply = await self.address.post(_GENERATE, body, deadline=self.limits.request_timeout)
        what = f"POST {self.url}{_GENERATE}"
        choice = _choice(what, reply)
        content = wanted(what, choice.get("logprobs"), dict, "logprobs").get("content")
        entries = wanted(what, content, list, "logprobs.content")
        ids = token_ids(what, choice.get("token_ids"), "token_ids")
        shown = [_id_of(what, entry) for entry in entries]
        _check_same(what, ids, shown)
        logprobs = numbers(
            what, [entry.get("logprob") for entry in entries], "logprobs.content[].logprob"
        )
        return self._answer(what, ask, reply, choice, ids, logprobs)

    async def _complete(self, ask: Ask) -> Answer:
        body = {
            "model": self._model,
            "request_id": ask.id,
            "prompt": ask.tokens,
            "stream": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **self._sampling(ask),
            **self._own_fields(ask),
        }
        reply = await self.address.post(_COMPLETIONS, body, deadline=self.limits.request_timeout)
        what = f"POST {self.url}{_COMPLETIONS}"
        choice = _choice(what, reply)
        logprobs = wanted(what, choice.get("logprobs"), dict, "logprobs")
        names = wanted(what, logprobs.get("tokens"), list, "logprobs.tokens")
        shown = [_id_of(what, {"token": name}) for name in names]
        ids = shown
        if choice.get("token_ids") is not None:  # absent in versions before return_token_ids
            ids = token_ids(what, choice["token_ids"], "token_ids")
            _check_same(what, ids, shown)
        sent = choice.get("prompt_token_ids")
        if sent is not None and sent != ask.tokens:
            raise ServerError(
                f"{what}: prompt_token_ids: wanted the ids that were sent, got others"
            )
        values = numbers(what, logprobs.get("token_logprobs"), "logprobs.token_logprobs")
        return self._answer(what, ask, reply, choice, ids, values)

    def _answer(
        self,
        what: str,
        ask: Ask,
        reply: dict[str, Any],
        choice: dict[str, Any],
        ids: list[int],
        logprobs: list[float],
    ) -> Answer:
        usage = reply.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        own = choice.get("rl") or {}
        if "processed" in own:  # whatever the server's logprobs mode
            logprobs = numbers(what, own["processed"], "rl.processed")
        answer = Answer(
            tokens=ids,
            logprobs=logprobs,
            finish=wanted(what, choice.get("finish_reason"), str, "finish_reason"),
            cached_tokens=details.get("cached_tokens") or 0,
            spans=spans(what, choice.get("weight_versions"), len(ids)),
            log_kept_mass=numbers(what, own.get("log_kept_mass", []), "rl.log_kept_mass"),
        )
        return check_answer(what, ask, answer)

    async def _label(self, version: str) -> None:
        """Gives the new weights their label and reads it back, where the server has labels."""
        if self.routes is None or "/update_weight_version" not in self.routes:
            return
        await self.control.post("/update_weight_version", {"new_version": version})
        if "/weight_info" in self.routes:
            body = await self.control.get("/weight_info")
            found = body.get("weight_version") if isinstance(body, dict) else None
            if str(found) != version:
                raise ServerError(
                    f"GET {self.control.url}/weight_info: wanted weight_version {version}, got {found}"
                )

    async def drop_cache(self) -> None:
        """Until the server says that it has: it may refuse while a request still holds pages."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        pauses = max(1, int(self.limits.timeout))
        for _ in range(pauses):
            body = await self.control.post(path)
            if not isinstance(body, dict) or body.get("success", True):
                return
            await asyncio.sleep(max(1.0, self.limits.retry_delay))
        raise ServerError(
            f"POST {self.control.url}{path}: wanted success within {pauses} s, got {body}"
        )


def _choice(what: str, reply: Any) -> dict[str, Any]:
    choices = wanted(what, wanted(what, reply, dict, "body").get("choices"), list, "choices")
    if len(choices) != 1:
        raise ServerError(f"{what}: choices: wanted 1, got {len(choices)}")
    return wanted(what, choices[0], dict, "choices[0]")


def _id_of(what: str, entry: Any) -> int:
    """The id of a log-probability's entry: `token_id`, or `token` as "token_id:17"."""
    wanted(what, entry, dict, "logprobs entry")
    if isinstance(entry.get("token_id"), int):
        return entry["token_id"]
    name = str(entry.get("token"))
    if not name.startswith("token_id:") or not name[9:].isdigit():
        raise ServerError(f"{what}: logprobs: wanted tokens as token_id:N, got {name!r}")
    return int(name[9:])


def _check_same(what: str, ids: list[int], shown: list[int]) -> None:
    if ids != shown:
        raise ServerError(
            f"{what}: wanted log-probabilities of the returned ids, got {len(shown)} of others"
        )
