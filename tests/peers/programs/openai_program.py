"""What a user of the official `openai` client does, against the server at $BANYAN_URL.

Runs in build/peers/clients; the model has a vocabulary of 320 and 512 positions and answers at
random, so what is checked is shape, counts, agreement of routes, and errors.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import openai
import pytest

URL = os.environ["BANYAN_URL"]
PROMPT = "the cat and the hat"
MESSAGES = [{"role": "user", "content": "the hat sat there"}]


@pytest.fixture(scope="module")
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=URL + "/v1", api_key="none", timeout=60, max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    models = client.models.list().data
    assert len(models) == 1
    assert models[0].object == "model"
    return models[0].id


def test_the_model_is_named_after_its_directory(model: str) -> None:
    assert model in (os.environ["BANYAN_MODEL"], Path(os.environ["BANYAN_MODEL"]).name)


def test_completion(client: openai.OpenAI, model: str) -> None:
    done = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, seed=3, extra_body={"ignore_eos": True}
    )
    assert done.id.startswith("cmpl-")
    assert done.object == "text_completion"
    assert len(done.choices) == 1
    choice = done.choices[0]
    assert choice.index == 0
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert isinstance(choice.text, str)
    assert done.usage.completion_tokens == 12
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12


def test_token_ids_are_a_prompt(client: openai.OpenAI, model: str) -> None:
    as_text = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    ids = as_text.choices[0].prompt_token_ids
    assert len(ids) == as_text.usage.prompt_tokens
    as_ids = client.completions.create(model=model, prompt=ids, max_tokens=8, temperature=0)
    assert as_ids.choices[0].text == as_text.choices[0].text


def test_several_prompts_and_responses_are_in_order(client: openai.OpenAI, model: str) -> None:
    prompts = [PROMPT, "naive", "What is 2+3?"]
    done = client.completions.create(model=model, prompt=prompts, n=2, max_tokens=6, seed=11)
    assert [choice.index for choice in done.choices] == list(range(6))
    alone = client.completions.create(model=model, prompt=prompts[1], n=2, max_tokens=6, seed=11)
    assert [c.text for c in done.choices[2:4]] == [c.text for c in alone.choices]


def test_child_i_of_a_seed_is_the_request_with_seed_plus_i(
    client: openai.OpenAI, model: str
) -> None:
    arguments = {"model": model, "prompt": PROMPT, "max_tokens": 10}
    group = client.completions.create(**arguments, n=4, seed=100)
    for i, choice in enumerate(group.choices):
        alone = client.completions.create(**arguments, seed=100 + i)
        assert alone.choices[0].text == choice.text
    assert len({choice.text for choice in group.choices}) > 1


def test_completion_logprobs(client: openai.OpenAI, model: str) -> None:
    done = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, logprobs=3, seed=1)
    found = done.choices[0].logprobs
    count = done.usage.completion_tokens
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == count
    assert len(found.text_offset) == count
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert logprob <= 0.0
        assert top[token] == logprob  # one array: equal, not close
        assert 3 <= len(top) <= 4
        assert sum(map(math.exp, top.values())) <= 1.0 + 1e-4


def test_echo_scores_the_prompt(client: openai.OpenAI, model: str) -> None:
    scored = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    found = scored.choices[0].logprobs
    assert scored.choices[0].text == PROMPT
    assert found.token_logprobs[0] is None
    assert all(logprob <= 0.0 for logprob in found.token_logprobs[1:])
    assert len(found.tokens) == scored.usage.prompt_tokens


def test_streamed_completion_equals_the_whole(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "prompt": PROMPT, "max_tokens": 20, "seed": 5, "n": 2}
    whole = client.completions.create(**arguments)
    texts, reasons = ["", ""], [None, None]
    usage = None
    stream = client.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat(client: openai.OpenAI, model: str) -> None:
    done = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_completion_tokens=9,
        seed=2,
        logprobs=True,
        top_logprobs=2,
    )
    assert done.id.startswith("chatcmpl-")
    assert done.object == "chat.completion"
    choice = done.choices[0]
    assert choice.message.role == "assistant"
    content = choice.logprobs.content
    assert len(content) == done.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) in (2, 3)
        assert entry.logprob <= 0.0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token or "\ufffd" in entry.token


def test_streamed_chat_equals_the_whole(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "messages": MESSAGES, "max_tokens": 16, "seed": 8, "n": 2}
    whole = client.chat.completions.create(**arguments)
    texts, roles, reasons = ["", ""], [None, None], [None, None]
    for chunk in client.chat.completions.create(**arguments, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            roles[choice.index] = roles[choice.index] or choice.delta.role
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_a_stop_string_is_cut_off(client: openai.OpenAI, model: str) -> None:
    arguments = {"model": model, "prompt": PROMPT, "max_tokens": 60, "seed": 21}
    free = client.completions.create(**arguments, extra_body={"ignore_eos": True}).choices[0].text
    stop = next(letter for letter in free[4:] if letter.isascii() and letter.isprintable())
    cut = client.completions.create(
        **arguments, stop=[stop], extra_body={"ignore_eos": True}
    ).choices[0]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"


def test_logit_bias_forces_a_token(client: openai.OpenAI, model: str) -> None:
    done = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        logit_bias={"40": 100},
        extra_body={"return_token_ids": True},
    )
    assert done.choices[0].token_ids == [40] * 4


def test_structured_output_is_one_of_the_choices(client: openai.OpenAI, model: str) -> None:
    done = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["the cat", "the hat"]}},
    )
    assert done.choices[0].text in ("the cat", "the hat")
    assert done.choices[0].finish_reason == "stop"


def test_json_mode_begins_an_object(client: openai.OpenAI, model: str) -> None:
    done = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=20,
        response_format={"type": "json_object"},
    )
    assert done.choices[0].message.content.startswith("{")


def test_a_grammar_is_obeyed(client: openai.OpenAI, model: str) -> None:
    grammar = 'root ::= ("the " | "a ") [ch] "at" # one of four'
    done = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=20, extra_body={"guided_grammar": grammar}
    )
    assert done.choices[0].text in ("the cat", "the hat", "a cat", "a hat")
    assert done.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 100000}, "n"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"guided_json": {"type": "objekt"}}}, "type: wanted one of string"),
        ({"extra_body": {"guided_decoding_backend": "x"}}, "guided_decoding_backend"),
        ({"temperature": 0, "n": 2}, "n"),
    ],
)
def test_a_wrong_parameter_is_a_400_that_names_it(
    client: openai.OpenAI, model: str, changes: dict, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": model, "prompt": PROMPT, "max_tokens": 4, **changes})
    assert caught.value.status_code == 400
    assert words in caught.value.body["message"]
    assert caught.value.body["code"] == 400
    assert caught.value.type == "BadRequestError"


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-model", prompt=PROMPT, max_tokens=1)
    assert caught.value.type == "NotFoundError"


def test_a_client_that_leaves_does_not_stop_the_next(client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    done = client.completions.create(model=model, prompt=PROMPT, max_tokens=3)
    assert done.usage.completion_tokens <= 3
