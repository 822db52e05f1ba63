"""Sampling through the engine, on a random model whose ids 0 to 127 are ASCII: structured output, stop strings, lists
of likely tokens, penalties and the noise of requests."""

from __future__ import annotations

import json
import math
import select
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from banyan.serve.structured import Grammars
from models import write_model
from oracle import hidden_states

from banyan import extension

core = extension.load()
VOCAB, END = 131, 130
TOKENS = [bytes([id]) if id < 128 else b"" for id in range(VOCAB)]
PROMPT = [72, 105, 33]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("models"))[1]


def running(directory: Path, dtype: str):
    made = core.Engine(core.Model.load(str(directory), dtype=dtype), {"kv_bytes": 2**25}, TOKENS)
    made.start()
    yield made
    made.stop(10.0)


@pytest.fixture(scope="module")
def engine(directory):
    """In bf16: the same bits whatever else is in the batch."""
    yield from running(directory, "bf16")


@pytest.fixture(scope="module")
def fp32_engine(directory):
    yield from running(directory, "fp32")


def answer(
    engine: Any, params: dict[str, Any], seconds: float = 30.0, **request: Any
) -> list[dict[str, Any]]:
    """Responses of one request by index, the tokens of their events joined."""
    wanted = {"prompt": PROMPT, "params": {"max_tokens": 40, "seed": 7} | params} | request
    id = engine.submit(wanted)
    found: dict[int, dict[str, Any]] = {}
    poll = select.poll()
    poll.register(engine.event_fd(), select.POLLIN)
    deadline = time.monotonic() + seconds
    while sum(one["finished"] for one in found.values()) < wanted.get("n", 1):
        assert time.monotonic() < deadline
        poll.poll(100)
        for event in engine.drain():
            assert event["request"] == id
            one = found.setdefault(
                event["index"],
                {"tokens": [], "raw": [], "processed": [], "log_kept_mass": [], "top": []},
            )
            for column in ("tokens", "raw", "processed", "log_kept_mass"):
                one[column] += event[column]
            one["top"] += event["top"] or []
            one |= {
                key: value for key, value in event.items() if key not in one or key == "finished"
            }
    return [found[index] for index in sorted(found)]


def text_of(one: dict[str, Any]) -> bytes:
    return b"".join(TOKENS[token] for token in one["tokens"])


def test_a_schema_is_obeyed(engine):
    schema = {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "kind": {"enum": ["x", "yz"]},
            "at": {"type": "string", "maxLength": 4},
        },
        "required": ["ok", "kind", "at"],
    }
    grammars = Grammars(TOKENS)
    try:
        table = grammars.compile("json", schema)
    finally:
        grammars.close()
    for one in answer(engine, {"grammar": table, "eos_ids": [END], "max_tokens": 200}, n=8):
        assert one["finish"] == "stop"
        assert one["tokens"][-1] == END
        value = json.loads(text_of(one))
        assert isinstance(value["ok"], bool)
        assert value["kind"] in ("x", "yz")
        assert len(value["at"]) <= 4
        assert all(math.isfinite(logprob) for logprob in one["raw"] + one["processed"])


def test_a_stop_string_ends_at_its_last_token(engine):
    (free,) = answer(engine, {"max_tokens": 60, "allowed_token_ids": list(range(97, 123))})
    text = text_of(free)
    stop = text[20:23]
    first = text.find(stop)
    params = {"max_tokens": 60, "allowed_token_ids": list(range(97, 123)), "stop": [b"\x00", stop]}
    (one,) = answer(engine, params)
    assert text_of(one) == text[: first + 3]
    assert one["finish"] == "stop"
    assert one["stop_string"] == 1
    assert one["raw"] == free["raw"][: first + 3]
    # Below min_tokens it is passed over.
    (longer,) = answer(engine, params | {"min_tokens": first + 4})
    assert len(longer["tokens"]) > first + 3


def test_penalties_keep_tokens_from_coming_back(engine):
    penalty = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    counts = []
    for params in ({}, penalty):
        found = answer(engine, params | {"max_tokens": 120, "temperature": 0.7}, n=4)
        counts.append(sum(len(set(one["tokens"])) for one in found))
        if params:
            assert all(one["processed"] != one["raw"] for one in found)
    assert counts[1] > counts[0]


def test_lists_are_those_of_the_model(fp32_engine, directory):
    (one,) = answer(
        fp32_engine, {"max_tokens": 8, "top_logprobs": 3, "logprob_token_ids": [5], "top_k": 10}
    )
    wanted = log_softmax_of(directory, PROMPT + one["tokens"])
    for place, (token, top) in enumerate(zip(one["tokens"], one["top"], strict=True)):
        law = wanted[len(PROMPT) - 1 + place]
        order = law.sort(descending=True).indices.tolist()
        assert [id for id, _, _ in top] == [token, *order[:3], 5]
        assert [rank for _, _, rank in top] == [order.index(id) + 1 for id, _, _ in top]
        for id, logprob, _ in top:
            assert logprob == pytest.approx(law[id].item(), abs=1e-4)
        kept = law[order[:10]].exp().sum().log().item()
        assert one["log_kept_mass"][place] == pytest.approx(kept, abs=1e-4)
        assert one["processed"][place] == pytest.approx(law[token].item() - kept, abs=1e-4)


def test_prompt_logprobs(fp32_engine, directory):
    (one,) = answer(fp32_engine, {"max_tokens": 1, "prompt_logprobs": 2})
    wanted = log_softmax_of(directory, PROMPT)
    first, *rest = one["prompt_logprobs"]
    assert first == []
    for place, top in enumerate(rest):
        law = wanted[place]
        assert [id for id, _, _ in top] == [PROMPT[place + 1], *law.topk(2).indices.tolist()]
        assert top[0][1] == pytest.approx(law[PROMPT[place + 1]].item(), abs=1e-4)


def log_softmax_of(directory: Path, ids: list[int]) -> torch.Tensor:
    """[S, V] of the plain decoder in double."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    weights = {
        name: value.double() for name, value in load_file(directory / "model.safetensors").items()
    }
    hidden = hidden_states(weights, config, torch.tensor([ids]))[0]
    return (hidden @ weights["model.embed_tokens.weight"].T).log_softmax(-1)


def test_a_group_equals_single_requests_and_prompts_have_noise_of_their_own(engine):
    group = answer(engine, {"seed": 20}, n=3)
    for index, one in enumerate(group):
        (alone,) = answer(engine, {"seed": 20 + index})
        assert alone["tokens"] == one["tokens"]
        assert alone["raw"] == one["raw"]
    (whole,) = answer(engine, {"seed": 20})
    done = whole["tokens"][:11]
    params = {"seed": 20, "max_tokens": 29}
    (rest,) = answer(engine, params, prompt=PROMPT + done, original_prompt=len(PROMPT))
    assert done + rest["tokens"] == whole["tokens"]
    (other,) = answer(engine, params, prompt=PROMPT + done)
    assert other["tokens"] != rest["tokens"]


def test_a_continuation_counts_what_was_said(engine):
    params = {
        "seed": 3,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.3,
        "bad_words": [[50, 51], [60]],
    }
    (whole,) = answer(engine, params)
    done = whole["tokens"][:15]
    (rest,) = answer(
        engine, params | {"max_tokens": 25}, prompt=PROMPT + done, original_prompt=len(PROMPT)
    )
    assert done + rest["tokens"] == whole["tokens"]
    assert rest["processed"] == whole["processed"][15:]


def test_what_leaves_nothing_fails_alone(engine):
    (one,) = answer(engine, {"allowed_token_ids": [65], "bad_words": [[65]]})
    assert "wanted at least one token that may follow" in one["error"]
    assert one["tokens"] == []
    (fine,) = answer(engine, {"max_tokens": 3})
    assert len(fine["tokens"]) == 3
