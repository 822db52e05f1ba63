"""Small routes: what is served, whether it is well, how much is going on."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from banyan import version
from banyan.serve import metrics, tokenization
from banyan.serve.context import Context
from banyan.serve.generation import JsonReply

Fields = dict[str, Any]
_DEAD = ("stopped",)


async def models(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply({"object": "list", "data": [_model(context, name) for name in context.names]})


async def model(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply(_model(context, context.check_model(request.path_params["model"])))


async def health(context: Context, request: Request, fields: Fields) -> Response:
    """200 while the engine's thread lives."""
    stats = await context.engine.stats()
    return Response(status_code=503 if stats.get("state") in _DEAD else 200)


async def ready(context: Context, request: Request, fields: Fields) -> Response:
    """200 while requests are taken."""
    stats = await context.engine.stats()
    taking = stats.get("state") == "running" and not stats.get("weights_missing")
    return Response(status_code=200 if taking else 503)


async def show_version(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply({"version": version(), "engine": "banyan"})


async def load(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply({"server_load": context.metrics.in_flight})


async def loads(context: Context, request: Request, fields: Fields) -> Response:
    """SGLang's figures of each rank; there is one."""
    stats = await context.engine.stats()
    pages = stats.get("num_pages", 0)
    entry = {
        "dp_rank": 0,
        "num_running_reqs": stats.get("running", 0),
        "num_waiting_reqs": stats.get("waiting", 0),
        "num_used_pages": stats.get("used_pages", 0),
        "num_pages": pages,
        "token_usage": stats.get("used_pages", 0) / pages if pages else 0.0,
    }
    return JsonReply({"timestamp": time.time(), "dp_rank_count": 1, "loads": [entry]})


async def server_info(context: Context, request: Request, fields: Fields) -> Response:
    """Effective settings and the engine's state."""
    stats = await context.engine.stats()
    shown = {"version": version(), "engine": "banyan", "max_model_len": context.shape.max_model_len}
    return JsonReply({**shown, "settings": context.settings, "state": stats})


async def model_info(context: Context, request: Request, fields: Fields) -> Response:
    stats = await context.engine.stats()
    shown = {
        "model_path": context.name,
        "tokenizer_path": context.name,
        "is_generation": True,
        "max_model_len": context.shape.max_model_len,
        "weight_version": stats.get("weight_version", ""),
    }
    return JsonReply(shown)


async def is_paused(context: Context, request: Request, fields: Fields) -> Response:
    stats = await context.engine.stats()
    return JsonReply({"is_paused": stats.get("state") in ("pausing", "paused")})


async def is_sleeping(context: Context, request: Request, fields: Fields) -> Response:
    stats = await context.engine.stats()
    return JsonReply({"is_sleeping": stats.get("state") == "asleep"})


async def show_metrics(context: Context, request: Request, fields: Fields) -> Response:
    text = context.metrics.text(await context.engine.stats())
    return PlainTextResponse(text, headers={"content-type": metrics.CONTENT_TYPE})


async def tokenize(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply(await context.work(tokenization.tokenize, context, fields))


async def detokenize(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply(await context.work(tokenization.detokenize, context, fields))


async def tokenizer_info(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply(tokenization.info(context))


def _model(context: Context, name: str) -> Fields:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "banyan",
        "root": context.name,
        "parent": None,
        "max_model_len": context.shape.max_model_len,
    }
