"""What a client is told when a request fails: status, one sentence without paths, and the request's id.

OpenAI, vLLM   {"error": {"message", "type", "param", "code", "request_id"}}
SGLang native  {"error": {"message", "request_id"}}
401            {"error": "Unauthorized"}
"""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Any

from banyan.errors import UserError, core_text
from banyan.serve.http_head import HeadError
from banyan.serve.strict_json import JsonError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_ENGINE_NAMES = re.compile(
    r"\b(?:gpu_memory_utilization|kv_bytes|kv_cache_memory_bytes|max_num_[a-z_]+)\b"
)
_OPTIONS = {"kv_bytes": "kv_cache_memory_bytes"}


class ApiError(Exception):
    """A request that ends with `status` and a sentence for its sender."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        """Retry-After with 503; a conflict is not to be tried again by itself."""
        found: dict[str, str] = {}
        if self.status == 503:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after or 1)))
        if self.status == 409:
            found["x-should-retry"] = "false"
        return found

    def body(self, request_id: str, dialect: str = "openai") -> dict[str, Any]:
        if self.status == 401:
            return {"error": "Unauthorized"}
        if dialect == "sglang":
            return {"error": {"message": self.message, "request_id": request_id}}
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, HTTPStatus(self.status).phrase.replace(" ", "")),
                "param": self.param,
                "code": self.status,
                "request_id": request_id,
            }
        }


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized")


def bad(message: str, param: str | None = None) -> ApiError:
    """A request that can never be taken."""
    return ApiError(400, message, param)


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """A request that cannot be taken now."""
    return ApiError(503, message, retry_after=retry_after)


def from_exception(error: BaseException, model_directory: str = "") -> ApiError | None:
    """The ApiError for what went wrong; None for a fault of ours, whose text no client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HeadError):
        return ApiError(error.status, error.message)
    if isinstance(error, JsonError):
        return bad(str(error))
    if hasattr(error, "retry_after") and hasattr(error, "code"):  # banyan._C.RequestError
        text = _without(core_text(error), model_directory)
        param = getattr(error, "param", "") or None
        return ApiError(int(error.code), text, param, error.retry_after or None)
    if isinstance(error, UserError | ValueError | IndexError | TypeError) and _is_meant(error):
        return bad(_without(core_text(error), model_directory))
    return None


def _is_meant(error: BaseException) -> bool:
    """Texts of UserError and of the core's checks (`[tag] what: ...`) are written for users; others are not."""
    return isinstance(error, UserError) or str(error).startswith("[")


def with_options(text: str) -> str:
    """A text of the core, where the options of `banyan serve` stand in the place of the engine's names."""
    return _ENGINE_NAMES.sub(
        lambda name: "--" + _OPTIONS.get(name[0], name[0]).replace("_", "-"), text
    )


def _without(text: str, directory: str) -> str:
    return with_options(text.replace(directory, "the model") if directory else text)
