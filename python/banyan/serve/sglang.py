"""POST /generate in SGLang's dialect: one prompt or a batch, cumulative text in streams, figures in `meta_info`."""

from __future__ import annotations

import time
from typing import Any

from banyan.serve import logprobs, sampling_params
from banyan.serve.choice import Choice, TextOptions, Top
from banyan.serve.context import Context
from banyan.serve.engine_client import Event
from banyan.serve.errors import bad
from banyan.serve.requests import engine_request, new_id
from banyan.serve.schema import check

Fields = dict[str, Any]


class SglangReply:
    """Responses in the order prompt * n + i; a single one is no list."""

    def __init__(self, context: Context, fields: Fields) -> None:
        """Tokenizes; runs off the loop. Raises ApiError."""
        self.context = context
        self.fields = fields
        self.stream = fields["stream"]
        self.started = time.monotonic()
        self.sampling = fields["sampling_params"] or check(context.tables["sglang_params"], {})
        prompts, self.batched = _prompts(context, fields)
        self.rids = _rids(fields["rid"], len(prompts))
        self.public_id = self.rids[0]
        params = sampling_params.sglang_params(context, self.sampling)
        self.requests = [self._request(prompt, params) for prompt in prompts]
        self.prompts = prompts
        n = self.sampling["n"]
        options = TextOptions(
            tuple(sampling_params.stop_strings(self.sampling)),
            self.sampling["skip_special_tokens"],
            self.sampling["no_stop_trim"],
        )
        self.choices = [
            Choice(index // n, index, context.tokens, options) for index in range(len(prompts) * n)
        ]

    def feed(self, event: Event, number: int) -> list[Fields]:
        choice = self.choices[number * self.sampling["n"] + event["index"]]
        choice.take(event)
        if not self.stream:
            return []
        shown = self._shown(choice)
        return [{"index": choice.index, **shown} if len(self.choices) > 1 else shown]

    def last_chunks(self) -> list[Fields]:
        return []

    def body(self) -> Any:
        shown = [self._shown(choice) for choice in self.choices]
        return shown if self.batched or len(shown) > 1 else shown[0]

    def _request(self, prompt: list[int], params: Fields) -> Fields:
        fields, own = self.fields, dict(params)
        wanted = self.sampling["max_new_tokens"]
        sampling_params.set_length(
            self.context, own, prompt, wanted, "sampling_params.max_new_tokens", 128
        )
        own["return_sampling_mask"] = fields["return_sampling_mask"]
        top = fields["top_logprobs_num"] if fields["return_logprob"] else -1
        own["top_logprobs"] = top
        if fields["return_logprob"]:
            own["logprob_token_ids"] = fields["token_ids_logprob"] or []
        scored = fields["return_logprob"] and 0 <= fields["logprob_start_len"] < len(prompt)
        if scored or wanted == 0:
            own["prompt_logprobs"] = max(top, 0)
        salt = fields["cache_salt"] or fields["extra_key"]
        call = {key: fields[key] for key in ("priority", "resume")}
        return engine_request({**call, "n": self.sampling["n"], "cache_salt": salt}, prompt, own)

    def _shown(self, choice: Choice) -> Fields:
        return {
            "text": choice.text,
            "output_ids": list(choice.ids),
            "meta_info": self._meta(choice),
        }

    def _meta(self, choice: Choice) -> Fields:
        final = choice.final or {}
        versions = choice.versions()
        meta: Fields = {
            "id": self.rids[choice.request],
            "finish_reason": self._finish(choice),
            "prompt_tokens": len(self.prompts[choice.request]),
            "completion_tokens": len(choice.ids),
            "cached_tokens": final.get("cached_tokens", 0),
            "num_retractions": final.get("num_retractions", 0),
            "weight_version": versions[-1]["version"] if versions else None,
            "e2e_latency": time.monotonic() - self.started,
        }
        if choice.final:
            meta["weight_versions"] = versions
        if self.fields["return_logprob"]:
            self._add_logprobs(meta, choice)
        if self.fields["return_sampling_mask"]:
            meta["sampling_mask"] = choice.masks
        return meta

    def _add_logprobs(self, meta: Fields, choice: Choice) -> None:
        shown = choice.shown(self.context.logprobs_mode == "processed_logprobs")
        meta["output_token_logprobs"] = [
            self._entry(value, id) for value, id in zip(shown, choice.ids, strict=True)
        ]
        asked = self.fields["token_ids_logprob"] or []
        top = self.fields["top_logprobs_num"]
        if top:
            meta["output_top_logprobs"] = [self._top(entries, top) for entries in choice.top]
        if asked:
            meta["output_token_ids_logprobs"] = [
                self._listed(entries, asked) for entries in choice.top
            ]
        start = self.fields["logprob_start_len"]
        found = (choice.final or {}).get("prompt_logprobs")
        if not found or start < 0:
            return
        prompt = self.prompts[choice.request]
        meta["input_token_logprobs"] = [
            self._entry(found[place][0][1] if found[place] else None, prompt[place])
            for place in range(start, len(prompt))
        ]
        if top:
            rows = found[start:]
            meta["input_top_logprobs"] = [self._top(row, top) if row else None for row in rows]

    def _top(self, entries: Top, count: int) -> list[list[Any]]:
        return [self._entry(value, id) for id, value in logprobs.likeliest(entries, count)]

    def _listed(self, entries: Top, asked: list[int]) -> list[list[Any]]:
        known = {id: value for id, value, _ in entries}
        return [self._entry(known.get(id), id) for id in asked]

    def _entry(self, value: float | None, id: int) -> list[Any]:
        text = self.context.tokens.name(id) if self.fields["return_text_in_logprobs"] else None
        return [None if value is None else logprobs.finite(value), id, text]

    def _finish(self, choice: Choice) -> Fields | None:
        if choice.finish is None:
            return None
        if choice.finish == "length":
            return {"type": "length", "length": len(choice.ids)}
        if choice.finish == "abort":
            return {"type": "abort", "message": "aborted"}
        matched = choice.stop_reason
        if matched is None and choice.ids:
            matched = choice.ids[-1]
        return {"type": "stop", "matched": matched}


def _prompts(context: Context, fields: Fields) -> tuple[list[list[int]], bool]:
    """Token ids of the prompts, and whether they came as a list."""
    if (fields["text"] is None) == (fields["input_ids"] is None):
        raise bad("text, input_ids: wanted one of them")
    if fields["text"] is not None:
        batched = isinstance(fields["text"], list)
        texts = fields["text"] if batched else [fields["text"]]
        for text in texts:
            context.check_length(text)
        return [context.chat.encode(text, add_special_tokens=True) for text in texts], batched
    batched = isinstance(fields["input_ids"][0], list)
    return (fields["input_ids"] if batched else [fields["input_ids"]]), batched


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != count:
            raise bad(f"rid: wanted {count}, got {len(rid)}", "rid")
        return rid
    first = rid or new_id("rid")
    return [first if index == 0 else f"{first}-{index}" for index in range(count)]
