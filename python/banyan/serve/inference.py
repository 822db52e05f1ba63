"""POST /inference/v1/generate: token ids in, token ids out. No text is made or read: the route for training."""

from __future__ import annotations

from typing import Any

from banyan.serve import logprobs, sampling_params
from banyan.serve.choice import Choice, TextOptions
from banyan.serve.context import Context
from banyan.serve.engine_client import Event
from banyan.serve.requests import OpenAiReply, Usage, check_stream, engine_request
from banyan.serve.schema import check

Fields = dict[str, Any]


class InferenceReply(OpenAiReply):
    """The n responses to one prompt of ids."""

    def __init__(self, context: Context, fields: Fields) -> None:
        """Raises ApiError."""
        super().__init__(context, fields, "gen")
        params_fields = fields["sampling_params"]
        if params_fields is None:
            params_fields = check(context.tables["sampling_params"], {})
        self.params_fields = params_fields
        check_stream({**fields, "prompt_logprobs": params_fields["prompt_logprobs"]})
        prompt = fields["token_ids"]
        params = sampling_params.openai_params(context, params_fields)
        self.seed = params["seed"]
        wanted = params_fields["max_tokens"]
        sampling_params.set_length(
            context, params, prompt, wanted, "sampling_params.max_tokens", 16
        )
        params["top_logprobs"] = sampling_params.top_count(params_fields["logprobs"])
        params["return_sampling_mask"] = params_fields["return_sampling_mask"]
        n = params_fields["n"]
        self.requests = [engine_request({**fields, "n": n}, prompt, params)]
        self.usage = Usage([prompt])
        options = TextOptions(tuple(sampling_params.stop_strings(params_fields)), show=False)
        self.choices = [Choice(0, index, context.tokens, options) for index in range(n)]

    def feed(self, event: Event, number: int) -> list[Fields]:
        choice = self.choices[event["index"]]
        delta = choice.take(event)
        self.usage.take(event, number, delta.end - delta.begin)
        if not self.stream:
            return []
        return [self.chunk(self._choice(choice, delta.begin, delta.end))]

    def body(self) -> Fields:
        found = None
        if self.params_fields["prompt_logprobs"] is not None:
            final = self.choices[0].final or {}
            found = logprobs.prompt(self.context.tokens, final.get("prompt_logprobs") or [])
        return {
            **self.head(False),
            "choices": [self._choice(choice, 0, len(choice.ids)) for choice in self.choices],
            "usage": self.usage.body(),
            "prompt_logprobs": found,
        }

    def head(self, chunk: bool) -> Fields:
        return {"request_id": self.public_id}

    def _choice(self, choice: Choice, begin: int, end: int) -> Fields:
        shown: Fields = {
            "index": choice.index,
            "token_ids": choice.ids[begin:end],
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self.params_fields["logprobs"] is not None:
            shown["logprobs"] = logprobs.by_id(choice, begin, end, self.processed)
        masks = self.params_fields["return_sampling_mask"]
        return shown | self.for_training(choice, begin, end, masks)
