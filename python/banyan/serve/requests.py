"""What the generation routes have in common: ids, usage, the engine's request."""

from __future__ import annotations

import secrets
import time
from typing import Any

from banyan.serve import logprobs
from banyan.serve.choice import Choice
from banyan.serve.context import Context
from banyan.serve.engine_client import Event
from banyan.serve.errors import bad

Fields = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


def engine_request(fields: Fields, prompt: list[int], params: Fields) -> Fields:
    """The dict that the binding takes; the client adds the id."""
    resume = fields.get("resume")
    if resume and resume["prompt_len"] > len(prompt):
        raise bad(
            f"resume.prompt_len: wanted <= {len(prompt)}, got {resume['prompt_len']}",
            "resume.prompt_len",
        )
    return {
        "prompt": prompt,
        "n": fields.get("n", 1),
        "params": params,
        "priority": fields.get("priority") or 0,
        "cache_salt": fields.get("cache_salt") or "",
        "group_id": fields.get("group_id") or "",
        "original_prompt": resume["prompt_len"] if resume else 0,
    }


def check_stream(fields: Fields) -> None:
    if fields["stream_options"] and not fields["stream"]:
        raise bad("stream_options: wanted stream = true beside it", "stream_options")
    if fields["stream"] and fields["prompt_logprobs"] is not None:
        raise bad("prompt_logprobs: not with stream", "prompt_logprobs")


class Usage:
    """Token counts of a whole request: each prompt once, every response."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompt = sum(len(prompt) for prompt in prompts)
        self._responses = 0
        self._cached: dict[int, int] = {}

    def take(self, event: Event, number: int, new_tokens: int) -> None:
        self._responses += new_tokens
        if event["finished"]:
            self._cached.setdefault(number, event["cached_tokens"])

    def body(self) -> Fields:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._responses,
            "total_tokens": self._prompt + self._responses,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class OpenAiReply:
    """What the answers of OpenAI's and vLLM's routes have in common. `kind` begins their ids."""

    seed: int
    usage: Usage

    def __init__(self, context: Context, fields: Fields, kind: str) -> None:
        """Raises ApiError for a model that is not served."""
        self.context = context
        self.fields = fields
        self.stream: bool = fields["stream"]
        self.model = context.check_model(fields["model"])
        self.public_id = fields["request_id"] or new_id(kind)
        self.created = int(time.time())
        self.processed = context.logprobs_mode == "processed_logprobs"
        self._options = fields["stream_options"] or {}

    def head(self, chunk: bool) -> Fields:
        """Fields of every chunk, or of the whole answer."""
        raise RuntimeError("[serve] head: a reply says what it is")

    def last_chunks(self) -> list[Fields]:
        if not self._options.get("include_usage"):
            return []
        return [{**self.head(True), "choices": [], "usage": self.usage.body()}]

    def chunk(self, choice: Fields) -> Fields:
        made = {**self.head(True), "choices": [choice]}
        if self._options.get("include_usage") and self._options.get("continuous_usage_stats"):
            made["usage"] = self.usage.body()
        return made

    def for_training(self, choice: Choice, begin: int, end: int, masks: bool) -> Fields:
        """Fields of tokens [begin, end) that training asks for."""
        shown: Fields = {}
        if masks:
            shown["sampling_mask"] = choice.masks[begin:end]
        if self.fields["return_weight_versions"] and choice.final:
            shown["weight_versions"] = choice.versions()
        if self.fields["return_rl"]:
            shown["rl"] = logprobs.for_training(choice, begin, end, self.seed)
        return shown
