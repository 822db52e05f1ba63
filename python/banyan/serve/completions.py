"""POST /v1/completions: text or token ids in, continuations out, streamed or whole."""

from __future__ import annotations

from typing import Any

from banyan.serve import logprobs, sampling_params
from banyan.serve.choice import Choice, TextOptions
from banyan.serve.context import Context
from banyan.serve.engine_client import Event
from banyan.serve.errors import bad
from banyan.serve.requests import OpenAiReply, Usage, check_stream, engine_request
from banyan.serve.text_stream import TextStream

Fields = dict[str, Any]


class CompletionReply(OpenAiReply):
    """Choices of all prompts, in the order prompt * n + i."""

    def __init__(self, context: Context, fields: Fields) -> None:
        """Renders nothing, tokenizes prompts, compiles a grammar: runs off the loop. Raises ApiError."""
        super().__init__(context, fields, "cmpl")
        self.prompts, given = _prompts(context, fields)
        self._check()
        params = sampling_params.openai_params(context, fields)
        self.seed = params["seed"]
        self.scores_only = fields["max_tokens"] == 0
        self.requests = [self._request(prompt, params) for prompt in self.prompts]
        self.usage = Usage(self.prompts)
        self._echoes = [
            _echo(context, fields, prompt, text) if fields["echo"] else ("", [])
            for prompt, text in zip(self.prompts, given, strict=True)
        ]
        options = TextOptions(
            tuple(sampling_params.stop_strings(fields)),
            fields["skip_special_tokens"],
            fields["include_stop_str_in_output"],
            fields["logprobs"] is not None,
            fields["detokenize"],
        )
        n = fields["n"]
        self.choices = [
            Choice(index // n, index, context.tokens, options, len(self._echoes[index // n][0]))
            for index in range(len(self.prompts) * n)
        ]

    def feed(self, event: Event, number: int) -> list[Fields]:
        choice = self.choices[number * self.fields["n"] + event["index"]]
        first = not choice.ids
        delta = choice.take(event)
        self.usage.take(event, number, delta.end - delta.begin)
        if not self.stream:
            return []
        text = (self._echoes[number][0] if first else "") + delta.text
        silent = not text and choice.finish is None
        if silent and self.fields["logprobs"] is None and not self.fields["return_token_ids"]:
            return []
        return [self.chunk(self._choice(choice, text, delta.begin, delta.end, first))]

    def body(self) -> Fields:
        choices = [
            self._choice(
                choice, self._echoes[choice.request][0] + choice.text, 0, len(choice.ids), True
            )
            for choice in self.choices
        ]
        return {**self.head(False), "choices": choices, "usage": self.usage.body()}

    def head(self, chunk: bool) -> Fields:
        return {
            "id": self.public_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _choice(self, choice: Choice, text: str, begin: int, end: int, first: bool) -> Fields:
        fields = self.fields
        shown: Fields = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, begin, end, first),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if fields["return_token_ids"]:
            shown["token_ids"] = choice.ids[begin:end]
            if first:
                shown["prompt_token_ids"] = self.prompts[choice.request]
        if fields["prompt_logprobs"] is not None and choice.final:
            found = choice.final["prompt_logprobs"] or []
            shown["prompt_logprobs"] = logprobs.prompt(choice.tokens, found)
        shown |= self.for_training(choice, begin, end, fields["return_sampling_mask"])
        if self.stream:
            optional = ("logprobs", "stop_reason")
            return {k: v for k, v in shown.items() if v is not None or k not in optional}
        return shown

    def _logprobs(self, choice: Choice, begin: int, end: int, first: bool) -> Fields | None:
        if self.fields["logprobs"] is None:
            return None
        as_ids = self.fields["return_tokens_as_token_ids"]
        found = logprobs.completion_delta(choice, begin, end, self.processed, as_ids)
        if self.fields["echo"] and first and choice.final:
            prompt = logprobs.completion_prompt(
                choice.tokens,
                self.prompts[choice.request],
                choice.final["prompt_logprobs"] or [],
                self._echoes[choice.request][1],
                as_ids,
            )
            found = logprobs.joined(prompt, found)
        return found

    def _check(self) -> None:
        fields = self.fields
        check_stream(fields)
        if fields["max_tokens"] == 0 and not fields["echo"] and fields["prompt_logprobs"] is None:
            raise bad("max_tokens: wanted >= 1, or 0 with echo to score the prompt", "max_tokens")
        if fields["stream"] and fields["echo"] and fields["logprobs"] is not None:
            raise bad("stream: an echo with logprobs is not streamed", "stream")
        sequences = len(self.prompts) * fields["n"]
        most = self.context.limits.sequences
        if sequences > most:
            raise bad(f"n: wanted prompts x n <= {most}, got {sequences}", "n")

    def _request(self, prompt: list[int], params: Fields) -> Fields:
        fields, own = self.fields, dict(params)
        sampling_params.set_length(
            self.context, own, prompt, fields["max_tokens"], "max_tokens", 16
        )
        own["top_logprobs"] = sampling_params.top_count(fields["logprobs"])
        own["return_sampling_mask"] = fields["return_sampling_mask"]
        if fields["echo"] and fields["logprobs"] is not None:
            own["prompt_logprobs"] = max(own["prompt_logprobs"], own["top_logprobs"])
        elif self.scores_only:
            own["prompt_logprobs"] = max(own["prompt_logprobs"], 0)
        return engine_request(fields, prompt, own)


def _prompts(context: Context, fields: Fields) -> tuple[list[list[int]], list[str | None]]:
    """Token ids of each prompt, and its text if it was given as text. Ids are taken as they are, never through text."""
    given = fields["prompt"]
    many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    keep = fields["truncate_prompt_tokens"]
    found: list[list[int]] = []
    for prompt in many:
        ids = prompt
        if isinstance(prompt, str):
            context.check_length(prompt)
            ids = context.chat.encode(prompt, add_special_tokens=fields["add_special_tokens"])
        if keep is not None:
            most = (
                context.shape.max_model_len - max(1, fields["max_tokens"] or 16)
                if keep < 0
                else keep
            )
            ids = ids[-most:] if most > 0 else []
        found.append(ids)
    texts = [prompt if isinstance(prompt, str) and keep is None else None for prompt in many]
    return found, texts


def _echo(
    context: Context, fields: Fields, prompt: list[int], given: str | None
) -> tuple[str, list[int]]:
    """The text of a prompt and where each of its tokens begins. Of a prompt given as text, special tokens that it
    spells are shown, those that were put before it are not."""
    hidden = 0
    if given is not None:
        while (
            hidden < len(prompt)
            and prompt[hidden] in context.tokens.special
            and not given.startswith(context.tokens.name(prompt[hidden]))
        ):
            hidden += 1
    skip = given is None and fields["skip_special_tokens"]
    stream = TextStream(context.tokens, skip_special=skip, with_offsets=True)
    text = stream.push(prompt[hidden:], finished=True)
    return text, [0] * hidden + stream.offsets
