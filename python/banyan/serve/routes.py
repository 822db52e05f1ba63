"""The routes that clients call; the control routes stand in admin.py, on a socket of their own."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from banyan.serve import page, status
from banyan.serve.chat import ChatReply
from banyan.serve.completions import CompletionReply
from banyan.serve.context import Context
from banyan.serve.generation import answer
from banyan.serve.inference import InferenceReply
from banyan.serve.route import Handler, Route
from banyan.serve.sampling_params import compile_grammars
from banyan.serve.sglang import SglangReply

Fields = dict[str, Any]
_BUSY = (404, 408, 409, 503)


def _generation(reply: Any) -> Handler:
    """Prepares a reply off the loop (templates, tokenizing, grammars), then answers."""

    async def call(context: Context, request: Request, fields: Fields) -> Response:
        made = await context.work(reply, context, fields)
        await compile_grammars(context, made.requests)
        return await answer(context, request, made)

    return call


def _post(path: str, summary: str, reply: Any, body: str, **more: Any) -> Route:
    return Route("POST", path, summary, _generation(reply), body, statuses=_BUSY, **more)


def _get(path: str, summary: str, call: Handler, **more: Any) -> Route:
    return Route("GET", path, summary, call, **more)


ROUTES = (
    _get("/", "A page to talk to the model", page.show, public=True, media_type="text/html"),
    _post("/v1/completions", "Continue text or token ids", CompletionReply, "completion"),
    _post("/v1/chat/completions", "Answer messages", ChatReply, "chat"),
    _get("/v1/models", "What is served", status.models),
    _get("/v1/models/{model:path}", "One of them", status.model, statuses=(404,)),
    _post("/inference/v1/generate", "Token ids in, token ids out", InferenceReply, "inference"),
    _post("/generate", "SGLang's dialect", SglangReply, "sglang", dialect="sglang"),
    Route(
        "POST",
        "/tokenize",
        "Text or messages to ids",
        status.tokenize,
        "tokenize",
        statuses=(404, 503),
    ),
    Route(
        "POST", "/detokenize", "Ids to text", status.detokenize, "detokenize", statuses=(404, 503)
    ),
    _get("/tokenizer_info", "Special tokens and template", status.tokenizer_info),
    _get(
        "/health",
        "Whether the engine lives",
        status.health,
        public=True,
        media_type="",
        statuses=(503,),
    ),
    _get(
        "/ready",
        "Whether requests are taken",
        status.ready,
        public=True,
        media_type="",
        statuses=(503,),
    ),
    _get("/ping", "As /health", status.health, public=True, media_type="", statuses=(503,)),
    _get(
        "/health_generate",
        "SGLang: as /health",
        status.health,
        public=True,
        media_type="",
        statuses=(503,),
    ),
    _get("/version", "Version of the server", status.show_version, public=True),
    _get("/load", "Requests in flight", status.load),
    _get("/v1/loads", "SGLang's figures of load", status.loads),
    _get("/server_info", "Effective settings and state", status.server_info),
    _get("/model_info", "SGLang's figures of the model", status.model_info),
    _get("/get_server_info", "As /server_info", status.server_info),
    _get("/get_model_info", "As /model_info", status.model_info),
    _get("/is_paused", "Whether generation is paused", status.is_paused),
    _get("/is_sleeping", "Whether the engine is asleep", status.is_sleeping),
    _get("/metrics", "Prometheus text", status.show_metrics, public=True, media_type="text/plain"),
)
