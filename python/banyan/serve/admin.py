"""Control routes: pause, abort, sleep, weights. They live on a second, loopback socket with a token of their own.

vLLM's spellings first, then SGLang's for the same calls of the engine. Each call has a deadline; one runs at a time,
but an abort and a resume, which end what a waiting pause waits for.
Routes that need a process group (weights over a collective) answer 400: this server has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from banyan.serve.context import Context
from banyan.serve.errors import bad
from banyan.serve.field_kinds import flag
from banyan.serve.generation import JsonReply
from banyan.serve.route import Route
from banyan.serve.schema import Field

Fields = dict[str, Any]
_MODES = ("abort", "wait", "keep", "retract")
_SGLANG_MODES = {"abort": "abort", "in_place": "keep", "retract": "retract"}
_TIMEOUT = Field("number", above=0, high=3600, default=60.0, note="seconds")
_STRINGS = Field("array", items=Field("string", max_bytes=256), max_items=4096)
_VERSION = Field("string", min_bytes=1, max_bytes=256)
_COLLECTIVE = "weights over a process group are not built; use a directory"


async def pause(context: Context, request: Request, fields: Fields) -> Response:
    await context.engine.control("pause", fields["mode"], fields["timeout"])
    return JsonReply({"status": "paused"})


async def resume(context: Context, request: Request, fields: Fields) -> Response:
    await context.engine.resume()
    return JsonReply({"status": "resumed"})


async def abort_requests(context: Context, request: Request, fields: Fields) -> Response:
    count = await context.engine.abort(fields["request_ids"] or [])
    return JsonReply({"status": "aborted", "aborted": count})


async def sleep(context: Context, request: Request, fields: Fields) -> Response:
    freed = await _sleep(context, fields["level"], fields["mode"], fields["timeout"])
    return JsonReply({"status": "sleeping", "level": fields["level"], "freed_bytes": freed})


async def release_kv_cache(context: Context, request: Request, fields: Fields) -> Response:
    await _release_kv_cache(context, fields["timeout"])
    return JsonReply({"status": "kv_cache_released"})


async def wake_up(context: Context, request: Request, fields: Fields) -> Response:
    left = await context.engine.control("wake", fields["tags"] or [])
    return JsonReply({"status": "sleeping" if left else "awake", "tags": left})


async def reset_prefix_cache(context: Context, request: Request, fields: Fields) -> Response:
    await context.engine.control("reset_prefix_cache", fields["reset_running_requests"])
    return JsonReply({"success": True})


async def collective_rpc(context: Context, request: Request, fields: Fields) -> Response:
    """Only `reload_weights` with `weights_path`."""
    if fields["method"] != "reload_weights":
        raise bad("method: wanted reload_weights, the only one that is built", "method")
    given = fields["kwargs"] or {}
    directory = given.get("weights_path")
    if not isinstance(directory, str) or not directory:
        raise bad("kwargs.weights_path: wanted a directory", "kwargs")
    await _load(
        context, directory, str(given.get("weight_version") or ""), False, fields["timeout"]
    )
    return JsonReply({"results": [None]})


async def weight_info(context: Context, request: Request, fields: Fields) -> Response:
    stats = await context.engine.stats()
    return JsonReply({"weight_version": stats["weight_version"], "epoch": stats["weight_epoch"]})


async def update_weight_version(context: Context, request: Request, fields: Fields) -> Response:
    await context.engine.control("set_weight_version", fields["new_version"])
    return JsonReply({"success": True, "new_version": fields["new_version"]})


async def world_size(context: Context, request: Request, fields: Fields) -> Response:
    return JsonReply({"world_size": 1})


async def weight_checker(context: Context, request: Request, fields: Fields) -> Response:
    if fields["action"] == "reset":
        return JsonReply({"status": "reset"})
    found = await context.engine.control("weight_checksums")
    if fields["action"] == "checksum":
        return JsonReply({"checksums": found})
    baseline = fields["baseline"] or {}
    names = sorted({*found, *baseline})
    wrong = [name for name in names if found.get(name) != baseline.get(name)]
    return JsonReply({"match": not wrong, "mismatches": wrong})


async def no_collective(context: Context, request: Request, fields: Fields) -> Response:
    raise bad(_COLLECTIVE)


async def pause_generation(context: Context, request: Request, fields: Fields) -> Response:
    mode = _SGLANG_MODES[fields["mode"]]
    await context.engine.control("pause", mode, fields["timeout"])
    return JsonReply({"status": "ok", "message": "Generation paused successfully."})


async def continue_generation(context: Context, request: Request, fields: Fields) -> Response:
    await context.engine.resume()
    return JsonReply({"status": "ok", "message": "Generation continued successfully."})


async def abort_request(context: Context, request: Request, fields: Fields) -> Response:
    if not fields["rid"] and not fields["abort_all"]:
        raise bad("rid: wanted a request id, or abort_all", "rid")
    count = await context.engine.abort([] if fields["abort_all"] else [fields["rid"]])
    return JsonReply({"success": True, "aborted": count})


async def flush_cache(context: Context, request: Request, fields: Fields) -> Response:
    await context.engine.control("reset_prefix_cache", False)
    return JsonReply({"success": True, "message": "Cache flushed."})


async def update_from_disk(context: Context, request: Request, fields: Fields) -> Response:
    version = fields["weight_version"] or ""
    keep = fields["keep_running"]
    await _load(context, fields["model_path"], version, keep, fields["timeout"])
    return JsonReply(
        {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    )


async def release_memory(context: Context, request: Request, fields: Fields) -> Response:
    tags = fields["tags"] or ["weights", "kv_cache"]
    if "weights" not in tags:
        await _release_kv_cache(context, fields["timeout"])
        return JsonReply({"success": True})
    freed = await _sleep(context, context.release_level, "abort", fields["timeout"])
    return JsonReply({"success": True, "freed_bytes": freed})


async def resume_memory(context: Context, request: Request, fields: Fields) -> Response:
    left = await context.engine.control("wake", fields["tags"] or [])
    return JsonReply({"success": True, "tags": left})


async def _release_kv_cache(context: Context, timeout: float) -> None:
    """Keys and values alone: the weights are awake again at once, so that waking `kv_cache` is enough to go on."""
    await _sleep(context, 1, "abort", timeout)
    await context.engine.control("wake", ["weights"])


async def _sleep(context: Context, level: int | None, mode: str, timeout: float) -> int:
    """Bytes freed."""
    if context.release_level is None:
        raise bad("the server runs with enable_sleep_mode = false")
    return await context.engine.control("sleep", level, mode, timeout)


async def _load(context: Context, directory: str, version: str, keep: bool, timeout: float) -> None:
    await context.engine.control("update_weights_from_disk", directory, version, keep, timeout)


_MODE = Field("string", choices=_MODES, default="abort")
_PAUSE = {"mode": _MODE, "timeout": _TIMEOUT, "clear_cache": flag(False)}
_SLEEP = {
    "level": Field("integer", low=0, high=2, default=1),
    "mode": _MODE,
    "timeout": _TIMEOUT,
}
_RPC = {
    "method": Field("string", required=True, max_bytes=256),
    "args": Field("array", max_items=64),
    "kwargs": Field("object"),
    "timeout": _TIMEOUT,
}
_RESET = {"reset_running_requests": flag(False), "reset_external": flag(False)}
_CHECK = {
    "action": Field("string", choices=("checksum", "reset", "compare"), required=True),
    "baseline": Field("map", items=Field("string", max_bytes=256)),
}
_SGLANG_PAUSE = {
    "mode": Field("string", choices=tuple(_SGLANG_MODES), default="abort"),
    "timeout": _TIMEOUT,
}
_ABORT = {"rid": Field("string", max_bytes=256), "abort_all": flag(False)}
_DISK = {
    "model_path": Field("string", required=True, min_bytes=1, max_bytes=4096),
    "weight_version": _VERSION,
    "keep_running": flag(False),
    "timeout": _TIMEOUT,
    "load_format": Field("string", choices=("auto", "safetensors")),
}
_TAGS = {"tags": Field("array", items=Field("string", choices=("weights", "kv_cache", "graphs")))}


def _post(path: str, summary: str, call: Any, body: Any = None, **more: Any) -> Route:
    optional = body is not None and not any(spec.required for spec in body.values())
    return Route("POST", path, summary, call, body, optional, statuses=(409, 503), **more)


ROUTES = (
    _post("/pause", "Stop generating", pause, query=_PAUSE),
    _post("/resume", "Go on generating", resume),
    _post("/abort_requests", "End requests; empty: all", abort_requests, {"request_ids": _STRINGS}),
    _post("/sleep", "Give memory back", sleep, query=_SLEEP),
    _post(
        "/release_kv_cache_memory",
        "Give the memory of keys and values back",
        release_kv_cache,
        query={"timeout": _TIMEOUT},
    ),
    _post("/wake_up", "Take memory again", wake_up, query=_TAGS),
    _post("/reset_prefix_cache", "Drop cached prefixes", reset_prefix_cache, query=_RESET),
    _post("/collective_rpc", "reload_weights", collective_rpc, _RPC),
    Route("GET", "/weight_info", "Version of the weights", weight_info),
    _post(
        "/update_weight_version",
        "Label the weights",
        update_weight_version,
        {"new_version": replace(_VERSION, required=True)},
    ),
    Route("GET", "/get_world_size", "Ranks", world_size, query={"include_dp": flag(True)}),
    _post("/weight_checker", "Checksums of the weights", weight_checker, _CHECK),
    *(
        _post(f"/{name}", "Refused: no process group", no_collective, {})
        for name in (
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "shutdown_weight_transfer_engine",
            "init_weights_update_group",
            "update_weights_from_distributed",
            "destroy_weights_update_group",
        )
    ),
    _post("/pause_generation", "SGLang: stop generating", pause_generation, _SGLANG_PAUSE),
    _post("/continue_generation", "SGLang: go on", continue_generation, {}),
    _post("/abort_request", "SGLang: end a request", abort_request, _ABORT),
    _post("/flush_cache", "SGLang: drop cached prefixes", flush_cache, query={"timeout": _TIMEOUT}),
    _post("/update_weights_from_disk", "SGLang: load a directory", update_from_disk, _DISK),
    _post(
        "/release_memory_occupation",
        "SGLang: sleep",
        release_memory,
        {**_TAGS, "timeout": _TIMEOUT},
    ),
    _post("/resume_memory_occupation", "SGLang: wake", resume_memory, _TAGS),
    _post("/weights_checker", "SGLang: checksums", weight_checker, _CHECK),
)
