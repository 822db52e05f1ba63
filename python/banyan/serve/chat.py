"""POST /v1/chat/completions: messages in, an answer out, with tool calls where the model writes them."""

from __future__ import annotations

from typing import Any

from banyan.serve import logprobs, sampling_params, tools
from banyan.serve.choice import Choice, TextOptions
from banyan.serve.context import Context
from banyan.serve.engine_client import Event
from banyan.serve.errors import bad
from banyan.serve.render import encode_messages
from banyan.serve.requests import OpenAiReply, Usage, check_stream, engine_request

Fields = dict[str, Any]


class ChatReply(OpenAiReply):
    """The n answers to a list of messages."""

    def __init__(self, context: Context, fields: Fields) -> None:
        """Renders the template and tokenizes: runs off the loop. Raises ApiError."""
        super().__init__(context, fields, "chatcmpl")
        check_stream(fields)
        if fields["top_logprobs"] is not None and not fields["logprobs"]:
            raise bad("top_logprobs: wanted logprobs = true beside it", "top_logprobs")
        self.prompt = encode_messages(context, fields)
        tools.constrain(fields)
        params = sampling_params.openai_params(context, fields)
        wanted = fields["max_completion_tokens"] or fields["max_tokens"]
        sampling_params.set_length(context, params, self.prompt, wanted, "max_completion_tokens")
        self.asked = fields["top_logprobs"] or 0
        params["top_logprobs"] = sampling_params.top_count(
            self.asked if fields["logprobs"] else None
        )
        params["return_sampling_mask"] = fields["return_sampling_mask"]
        self.seed = params["seed"]
        self.requests = [engine_request(fields, self.prompt, params)]
        self.usage = Usage([self.prompt])
        options = TextOptions(
            tuple(sampling_params.stop_strings(fields)),
            fields["skip_special_tokens"],
            fields["include_stop_str_in_output"],
        )
        count = fields["n"]
        self.choices = [Choice(0, index, context.tokens, options) for index in range(count)]
        self.parsers = [tools.parser(context.tool_format, fields) for _ in range(count)]
        self._opened = [False] * count

    def feed(self, event: Event, number: int) -> list[Fields]:
        choice = self.choices[event["index"]]
        delta = choice.take(event)
        self.usage.take(event, number, delta.end - delta.begin)
        if not self.stream:
            return []
        pieces = self.parsers[choice.index].push(delta.text, choice.finish is not None)
        chunks = []
        if not self._opened[choice.index]:
            self._opened[choice.index] = True
            first: Fields = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(choice, first, prompt_token_ids=True))
        shown = self._token_fields(choice, delta.begin, delta.end)
        if not pieces and (shown or choice.finish is not None):
            pieces = [{}]
        for place, piece in enumerate(pieces):
            last = place == len(pieces) - 1
            chunks.append(self._chunk(choice, piece, shown if last else {}, ends=last))
        return chunks

    def body(self) -> Fields:
        answer: Fields = {
            **self.head(False),
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self.usage.body(),
        }
        if self.fields["return_token_ids"]:
            answer["prompt_token_ids"] = self.prompt
        if self.fields["prompt_logprobs"] is not None:
            found = (self.choices[0].final or {}).get("prompt_logprobs") or []
            answer["prompt_logprobs"] = logprobs.prompt(self.context.tokens, found)
        return answer

    def _choice(self, choice: Choice) -> Fields:
        parser = self.parsers[choice.index]
        message: Fields = {"role": "assistant", "content": None}
        calls: list[Fields] = []
        for piece in parser.push(choice.text, True):
            if "content" in piece:
                message["content"] = (message["content"] or "") + piece["content"]
            calls += [_whole_call(call) for call in piece.get("tool_calls", [])]
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        shown: Fields = {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish(choice),
            "stop_reason": choice.stop_reason,
        }
        return {**shown, **self._token_fields(choice, 0, len(choice.ids))}

    def head(self, chunk: bool) -> Fields:
        return {
            "id": self.public_id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self.created,
            "model": self.model,
        }

    def _chunk(
        self,
        choice: Choice,
        delta: Fields,
        shown: Fields | None = None,
        ends: bool = False,
        prompt_token_ids: bool = False,
    ) -> Fields:
        part: Fields = {
            "index": choice.index,
            "delta": delta,
            "finish_reason": None,
            **(shown or {}),
        }
        if ends and choice.finish is not None:
            part["finish_reason"] = self._finish(choice)
            if choice.stop_reason is not None:
                part["stop_reason"] = choice.stop_reason
        chunk = self.chunk(part)
        if prompt_token_ids and self.fields["return_token_ids"]:
            chunk["prompt_token_ids"] = self.prompt
        return chunk

    def _finish(self, choice: Choice) -> str | None:
        called = self.parsers[choice.index].called
        return "tool_calls" if choice.finish == "stop" and called else choice.finish

    def _token_fields(self, choice: Choice, begin: int, end: int) -> Fields:
        """Fields of tokens [begin, end), as asked for."""
        fields = self.fields
        shown: Fields = {}
        if fields["logprobs"] and end > begin:
            as_ids = fields["return_tokens_as_token_ids"]
            shown["logprobs"] = logprobs.chat(
                choice, begin, end, self.processed, self.asked, as_ids
            )
        if fields["return_token_ids"]:
            shown["token_ids"] = choice.ids[begin:end]
        return shown | self.for_training(choice, begin, end, fields["return_sampling_mask"])


def _whole_call(call: Fields) -> Fields:
    return {key: value for key, value in call.items() if key != "index"}
