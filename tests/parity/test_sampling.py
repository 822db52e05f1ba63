"""One draw of the engine's sampler against a restatement in numpy (rollout specification 3.2, 8.2), row by row.

The restatement sorts the whole vocabulary in double precision and knows nothing of tiles, cuts or undo lists.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from banyan import extension

core = extension.load()
GREEDY = 1e-5


def edited(logits: np.ndarray, request: dict[str, Any]) -> np.ndarray:
    """Step 2: masks, bias, penalties. A grammar is a list of allowed ids here."""
    params, prompt, response = request["params"], request["prompt"], request["response"]
    z = logits.astype(np.float64)
    vocab = len(z)

    def keep_only(ids: list[int]) -> None:
        barred = np.ones(vocab, bool)
        barred[ids] = False
        z[barred] = -np.inf

    if params.get("grammar") is not None:
        keep_only(request["grammar_ids"])
    if params.get("allowed_token_ids"):
        keep_only(params["allowed_token_ids"])
    for word in params.get("bad_words", []):
        before = word[:-1]
        if not before or response[-len(before) :] == before:
            z[word[-1]] = -np.inf
    if len(response) < params.get("min_tokens", 0):
        ends = set(params.get("stop_token_ids", []))
        # A grammar's final state admits EOS whatever ignore_eos says.
        if not params.get("ignore_eos") or params.get("grammar") is not None:
            ends |= set(params.get("eos_ids", []))
        z[list(ends)] = -np.inf
    for id, bias in params.get("logit_bias", {}).items():
        z[id] += min(100.0, max(-100.0, bias))
    rho = params.get("repetition_penalty", 1.0)
    for id in set(prompt) | set(response):
        z[id] = z[id] / rho if z[id] > 0 else z[id] * rho
    for id in set(response):
        z[id] -= params.get("frequency_penalty", 0.0) * response.count(id)
        z[id] -= params.get("presence_penalty", 0.0)
    return z


def survivors(z: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Step 3: ids that are left, likeliest first."""
    order = np.lexsort((np.arange(len(z)), -z))
    order = order[z[order] > -np.inf]
    temperature = params.get("temperature", 1.0)
    if temperature < GREEDY:
        return order
    mass = np.exp((z[order] - z[order[0]]) / temperature)
    keep = mass >= params.get("min_p", 0.0)
    order, mass = order[keep], mass[keep]
    k = params.get("top_k", -1)
    if 0 < k < len(order):
        end = k
        if params.get("top_k_ties"):
            end = int(np.sum(z[order] >= z[order[k - 1]]))
        order, mass = order[:end], mass[:end]
    top_p = params.get("top_p", 1.0)
    if top_p < 1.0:
        share = np.cumsum(mass) / mass.sum()
        order = order[: int(np.argmax(share >= top_p)) + 1]
    return order


def log_softmax(z: np.ndarray) -> np.ndarray:
    top = z.max()
    return z - top - math.log(np.exp(z - top).sum())


def random_request(draw: random.Random, vocab: int) -> dict[str, Any]:
    def ids(most: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(draw.randint(0, most))]

    choices: dict[str, list[Any]] = {
        "temperature": [1.0, 1.0, 0.7, 1.6, 0.0],
        "top_k": [-1, 0, 1, 3, 50, 10**9],
        "top_k_ties": [False, True],
        "top_p": [1.0, 1.0, 0.93, 0.4, 1e-6],
        "min_p": [0.0, 0.0, 0.02, 0.5],
        "repetition_penalty": [1.0, 1.0, 1.2, 0.7],
        "presence_penalty": [0.0, 0.0, 1.1, -2.0],
        "frequency_penalty": [0.0, 0.0, 0.4, -0.3],
        "min_tokens": [0, 0, 100],
        "ignore_eos": [False, True],
        "processed_logprobs": [False, True],
        "top_logprobs": [-1, 0, 4],
    }
    params = {name: draw.choice(values) for name, values in choices.items()}
    params |= {
        "max_tokens": 1000,
        "return_sampling_mask": True,
        "eos_ids": [0],
        "stop_token_ids": [vocab - 1],
    }
    if draw.random() < 0.3:
        params["logit_bias"] = {id: draw.uniform(-5, 5) for id in ids(6)}
    if draw.random() < 0.3:
        params["bad_words"] = [[id] for id in ids(2)] + [[3, 4]]
    if draw.random() < 0.2:
        params["allowed_token_ids"] = [1, 2, *ids(30)]
    request = {
        "params": params,
        "prompt": [1, *ids(8)],
        "response": [*ids(8), 3],
        "uniform": draw.random() * 0.999,
    }
    if draw.random() < 0.15 and vocab > 8:
        allowed = sorted({5, 6, 7, *ids(40)})
        count = len(allowed)
        request["params"]["grammar"] = core.TokenTable([0, count], allowed, [0] * count, [0])
        request["grammar_ids"] = allowed
        request["response"] = [draw.choice(allowed) for _ in range(4)]
    return request


@pytest.mark.parametrize("vocab", [9, 300, 5000])
def test_equals_the_restatement(vocab: int) -> None:
    draw = random.Random(vocab)
    noise = np.random.default_rng(vocab)
    rows, requests = [], []
    for _ in range(250):
        row = noise.normal(0.0, draw.choice([0.3, 1.5, 4.0]), vocab).astype(np.float32)
        row[:: draw.choice([2, 5])] = row[0]  # ties
        rows.append(row)
        requests.append(random_request(draw, vocab))
    for row, request, got in zip(
        rows, requests, core.sample_rows(np.stack(rows), requests), strict=True
    ):
        check_row(row, request, got)


def check_row(row: np.ndarray, request: dict[str, Any], got: dict[str, Any]) -> None:
    params = request["params"]
    z = edited(row, request)
    if not np.isfinite(z).any():
        assert not got["drawn"]
        return
    assert got["drawn"]
    greedy = params["temperature"] < GREEDY
    left = survivors(z, params)
    token = got["token"]
    law = log_softmax(z / (1.0 if greedy else params["temperature"]))
    raw = log_softmax(row.astype(np.float64))
    assert got["raw"] == pytest.approx(raw[token], abs=2e-5)
    assert got["logprob"] == pytest.approx(law[token], abs=2e-5)
    assert got["processed"] + got["log_kept_mass"] == pytest.approx(got["logprob"], abs=1e-5)
    if greedy:
        assert token == left[0]
        assert got["log_kept_mass"] == 0.0
        return
    assert token in left
    mask = got["sampling_mask"]
    cut = len(left) < np.isfinite(z).sum()
    if not mask:
        assert not cut
        assert np.isfinite(z).all()
    else:
        assert mask == sorted(mask)
        # Sums in fp32: a token at the very border of top_p or min_p may fall on either side.
        assert abs(len(mask) - len(left)) <= 1
    if not mask or set(mask) == set(left.tolist()):
        kept = math.log(np.exp(law[left]).sum())
        assert got["log_kept_mass"] == pytest.approx(kept if cut else 0.0, abs=2e-5)
        # The inverse of the cumulative distribution in the order of ids.
        ids = np.sort(left)
        share = np.cumsum(np.exp(law[ids] - kept))
        place = int(np.searchsorted(share, request["uniform"], side="right"))
        if np.min(np.abs(share - request["uniform"])) > 1e-5:
            assert token == ids[min(place, len(ids) - 1)]
    check_top(row, z, law, raw, left, params, got)


def check_top(
    row: np.ndarray,
    z: np.ndarray,
    law: np.ndarray,
    raw: np.ndarray,
    left: np.ndarray,
    params: dict[str, Any],
    got: dict[str, Any],
) -> None:
    if params["top_logprobs"] < 0:
        assert got["top"] == []
        return
    processed = params["processed_logprobs"]
    values = z if processed else row.astype(np.float64)
    order = np.lexsort((np.arange(len(values)), -values))
    rank = {int(id): place + 1 for place, id in enumerate(order)}
    first, *top = got["top"]
    assert first == (
        got["token"],
        got["processed"] if processed else got["raw"],
        rank[got["token"]],
    )
    if processed and len(got["sampling_mask"]) not in (0, len(left)):
        return
    count = min(params["top_logprobs"], len(left) if processed else len(values))
    assert [(id, place) for id, _, place in top] == [
        (int(id), rank[int(id)]) for id in order[:count]
    ]
    for id, logprob, _ in top:
        wanted = law[id] - got["log_kept_mass"] if processed else raw[id]
        assert logprob == pytest.approx(wanted, abs=2e-5)


FILTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.08},
    "all three": {"min_p": 0.01, "top_k": 25, "top_p": 0.9, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
}


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_follow_the_law(name: str) -> None:
    """Pearson's chi-square of 4,000 draws with fixed seeds, within 4.5 standard deviations."""
    draws = 4000
    params = FILTERS[name] | {"max_tokens": 1000}
    row = np.random.default_rng(5).normal(0.0, 1.5, 120).astype(np.float32)
    uniform = np.random.default_rng(6).random(draws) * 0.9999999
    requests = [
        {"params": params, "prompt": [1, 2], "response": [3, 3, 4], "uniform": u} for u in uniform
    ]
    found = core.sample_rows(np.tile(row, (draws, 1)), requests)
    z = edited(row, requests[0])
    left = survivors(z, params)
    law = log_softmax(z / params.get("temperature", 1.0))[left]
    wanted = np.exp(law - math.log(np.exp(law).sum())) * draws
    tokens = [one["token"] for one in found]
    assert set(tokens) <= set(left.tolist())
    seen = np.array([tokens.count(id) for id in left], float)
    common = wanted >= 5
    cells = list(zip(seen[common], wanted[common], strict=True))
    if wanted[~common].sum() >= 5:
        cells.append((seen[~common].sum(), wanted[~common].sum()))
    statistic = sum((have - want) ** 2 / want for have, want in cells)
    degrees = len(cells) - 1
    assert (statistic - degrees) / math.sqrt(2 * degrees) < 4.5


def test_an_unknown_parameter_is_refused() -> None:
    row = np.zeros((1, 4), np.float32)
    request = {
        "params": {"max_tokens": 1, "best_of": 2},
        "prompt": [0],
        "response": [],
        "uniform": 0.0,
    }
    with pytest.raises(ValueError, match=r"sampling parameter.*best_of"):
        core.sample_rows(row, [request])


def test_the_limits_are_one_table() -> None:
    limits = {row["name"]: row for row in core.sampling_limits()}
    assert limits["temperature"]["openai"] == (0, 2)
    assert limits["temperature"]["sglang"] == (0, math.inf)
    assert limits["top_p"]["above_low"]
    assert limits["top_p"]["engine"] == (0, 1)
    assert limits["n"]["openai"] == (1, 128)
    assert limits["repetition_penalty"]["sglang"] == (0, 2)
    assert limits["stop.count"]["openai"][1] == 16
    for row in limits.values():
        for dialect in ("openai", "sglang"):
            assert row["engine"][0] <= row[dialect][0] <= row[dialect][1] <= row["engine"][1]
