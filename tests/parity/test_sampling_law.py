"""Sampled frequencies match the law that the specification of the rollout gives (3.2), by a chi-square test.

`law` is written here from the specification, in fp64 over the model's own logits: masks, bias, penalties, temperature,
min_p, top_k, top_p, each over what the one before left. Thousands of responses are drawn; seeds are fixed,
so an outcome never changes.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from models import write_model

from banyan import _C

VOCAB = 131
PROMPT = [5, 17, 17, 40, 99, 3, 17, 40, 61, 8]
FIRST = 9  # the likeliest first token
DRAWS = 12000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, path = write_model("llama_untied", tmp_path_factory.mktemp("model"))
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)  # a law with peaks, so that a wrong one shows
    model.save_pretrained(path)
    return _C.Model.load(str(path), "fp32")


def penalised(logits: torch.Tensor, response: list[int], params: dict[str, Any]) -> torch.Tensor:
    """z' of the specification: masks, bias and penalties on the logits z."""
    z = logits.double().clone()
    allowed = params.get("allowed_token_ids")
    if allowed:
        z[[i for i in range(VOCAB) if i not in allowed]] = -math.inf
    for words in params.get("bad_words", []):
        before = words[:-1]
        if not before or response[-len(before) :] == before:
            z[words[-1]] = -math.inf
    if len(response) < params.get("min_tokens", 0):
        z[params.get("eos_ids", []) + params.get("stop_token_ids", [])] = -math.inf
    for token, bias in params.get("logit_bias", {}).items():
        z[token] += bias
    rho = params.get("repetition_penalty", 1.0)
    for token in set(PROMPT + response):
        z[token] = z[token] / rho if z[token] > 0 else z[token] * rho
    for token, count in Counter(response).items():
        z[token] -= params.get("frequency_penalty", 0.0) * count
        z[token] -= params.get("presence_penalty", 0.0)
    return z


def law(logits: torch.Tensor, response: list[int], params: dict[str, Any]) -> torch.Tensor:
    """Probabilities of the next token. [V] fp64"""
    p = torch.softmax(penalised(logits, response, params) / params.get("temperature", 1.0), -1)
    p = torch.where(p >= params.get("min_p", 0.0) * p.max(), p, 0.0)
    p /= p.sum()
    top_k = params.get("top_k", -1)
    if top_k > 0:
        order = torch.sort(p, descending=True, stable=True).indices  # equal: the lower id first
        p[order[top_k:]] = 0.0
        p /= p.sum()
    ranked = torch.sort(p, descending=True, stable=True)
    before = ranked.values.cumsum(-1) - ranked.values
    p[ranked.indices[before >= params.get("top_p", 1.0)]] = 0.0
    return p / p.sum()


def draw(
    model: Any, params: dict[str, Any], max_tokens: int, draws: int = DRAWS
) -> list[list[int]]:
    """Responses to PROMPT, half of them with one seed, half with another."""
    engine = _C.Engine(model, {"max_num_seqs": 2000})
    found: list[list[int]] = []
    for seed in (1, 2):
        rows = [{"row": seed, "tokens": PROMPT, "n": draws // 2}]
        given = {"max_tokens": max_tokens, "seed": seed, **params}
        engine.generate(rows, given, lambda trajectory: found.append(list(trajectory["response"])))
    assert len(found) == draws
    return found


def assert_law(tokens: list[int], p: torch.Tensor) -> None:
    """Nothing outside the support, and a chi-square within 4.5 standard deviations (Wilson-Hilferty)."""
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    assert counts[p == 0].sum() == 0
    expected = p * len(tokens)
    large = expected >= 8
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    if wanted[-1] < 8:  # too few to count apart
        observed = torch.cat([observed[:-2], observed[-2:].sum()[None]])
        wanted = torch.cat([wanted[:-2], wanted[-2:].sum()[None]])
    freedom = len(wanted) - 1
    if freedom == 0:
        return
    statistic = ((observed - wanted) ** 2 / wanted).sum().item()
    width = 2 / (9 * freedom)
    deviations = ((statistic / freedom) ** (1 / 3) - (1 - width)) / math.sqrt(width)
    assert abs(deviations) < 4.5, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.2},
    "all cuts": {"temperature": 1.3, "min_p": 0.02, "top_k": 40, "top_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": {94: 1.0, 9: -2.0, 4: 6.0}},
    "allowed_token_ids": {"allowed_token_ids": [2, 9, 17, 28, 55, 99, 120]},
    "bad_words": {"bad_words": [[9], [61, 94], [128]]},
    "min_tokens": {"min_tokens": 1, "eos_ids": [92], "stop_token_ids": [103, 61]},
}


@pytest.mark.parametrize("name", FILTERS)
def test_first_token(model: Any, name: str) -> None:
    params = FILTERS[name]
    logits = _C.logits(model, [PROMPT])[0][-1]
    tokens = [response[0] for response in draw(model, params, max_tokens=1)]
    assert_law(tokens, law(logits, [], params))


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.3, "presence_penalty": -1.0, "top_k": 50},
    ],
)
def test_penalties_of_the_response(model: Any, params: dict[str, Any]) -> None:
    """The second token, given the likeliest first one."""
    favoured = {"logit_bias": {FIRST: 2.0}, "temperature": 0.8, **params}
    responses = draw(model, favoured, max_tokens=2, draws=4000)
    assert sum(response[0] == FIRST for response in responses) > 1000
    seconds = [response[1] for response in responses if response[0] == FIRST]
    logits = _C.logits(model, [[*PROMPT, FIRST]])[0][-1]
    assert_law(seconds, law(logits, [FIRST], favoured))


def test_a_wrong_law_is_found(model: Any) -> None:
    """The test can fail: a law that is off by a few per cent does."""
    logits = _C.logits(model, [PROMPT])[0][-1]
    tokens = [response[0] for response in draw(model, {}, max_tokens=1)]
    with pytest.raises(AssertionError):
        assert_law(tokens, law(logits, [], {"temperature": 0.9}))
    with pytest.raises(AssertionError):
        assert_law(tokens, law(logits, [], {"top_p": 0.97}))


def test_the_law_by_hand() -> None:
    """The law itself, by hand: 4 tokens, top_k then top_p, each over what was left."""
    logits = torch.full((VOCAB,), -math.inf)
    logits[:4] = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    p = law(logits, [], {"top_k": 3, "top_p": 0.7})
    assert p[:4].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    p = law(logits, [], {"min_p": 0.45})
    assert p[:4].tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
