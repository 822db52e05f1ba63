"""Greedy tokens equal transformers', fp32. Where transformers' two best logits are closer than 1e-4 either may win:
such positions are excused and counted.

banyan generates; transformers then runs once over prompt and response. By induction over the positions, every token
equal to transformers' choice there means the greedy responses are equal; after an excused position the comparison goes
on along banyan's response.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from banyan.bench.work import find_gsm8k
from banyan.data import gsm8k
from banyan.data.chat import Chat
from conftest import needs_smollm2
from models import random_samples, write_model
from transformers import AutoModelForCausalLM

from banyan import _C

CLOSE = 1e-4
NUM_PROMPTS = 200


def greedy(
    path: Path, prompts: list[list[int]], max_tokens: int, eos: list[int]
) -> list[list[int]]:
    """banyan's responses, all prompts at once."""
    found: list[dict] = []
    longest = max(map(len, prompts)) + max_tokens
    engine = _C.Engine(_C.Model.load(str(path), "fp32"), {"max_model_len": longest})
    rows = [{"row": i, "tokens": prompt, "n": 1} for i, prompt in enumerate(prompts)]
    params = {"temperature": 0.0, "max_tokens": max_tokens, "eos_ids": eos}
    engine.generate(rows, params, found.append)
    return [list(t["response"]) for t in sorted(found, key=lambda t: t["row"])]


def choices(
    model: torch.nn.Module, prompts: list[list[int]], responses: list[list[int]]
) -> Iterator[tuple[int, int, int, float]]:
    """(prompt, banyan's token, transformers' token, gap of its two best logits) of every position."""
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = torch.tensor([prompt + response[:-1]])
        with torch.no_grad():
            logits = model(ids, logits_to_keep=len(response)).logits[0].float()
        best = logits.topk(2, dim=-1)
        gaps = best.values[:, 0] - best.values[:, 1]
        for token, choice, gap in zip(
            response, best.indices[:, 0].tolist(), gaps.tolist(), strict=True
        ):
            yield row, token, choice, gap


def compare(model: torch.nn.Module, prompts: list[list[int]], responses: list[list[int]]) -> str:
    """Fails at the first token that differs without excuse; says how many were excused."""
    positions = excused = differing = 0
    for row, token, choice, gap in choices(model, prompts, responses):
        positions += 1
        excused += gap < CLOSE
        if token != choice:
            differing += 1
            assert gap < CLOSE, f"prompt {row}: wanted token {choice}, got {token}, gap {gap:.2e}"
    assert positions >= len(prompts)
    assert excused <= 0.01 * positions
    return f"{positions} positions, {excused} excused, {differing} of them differ"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama3_rope"])
def test_tiny_models(name: str, tmp_path: Path) -> None:
    model, path = write_model(name, tmp_path)
    prompts = random_samples(5, 131)
    responses = greedy(path, prompts, max_tokens=40, eos=[])
    assert {len(response) for response in responses} == {40}
    compare(model, prompts, responses)


def test_tiny_model_ends_at_eos(tmp_path: Path) -> None:
    _, path = write_model("llama", tmp_path)
    prompts = random_samples(6, 131)
    free = greedy(path, prompts, max_tokens=30, eos=[])
    eos = [free[0][4], free[1][9]]
    ended = greedy(path, prompts, max_tokens=30, eos=eos)
    for response, whole in zip(ended, free, strict=True):
        ends = [i for i, token in enumerate(whole) if token in eos]
        assert response == (whole[: ends[0] + 1] if ends else whole)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_smollm2
@pytest.mark.skipif(find_gsm8k() is None, reason="GSM8K is not on this machine (BANYAN_TEST_DATA)")
def test_gsm8k(smollm2: Path, capsys: pytest.CaptureFixture) -> None:
    chat = Chat(smollm2)
    rows = gsm8k.convert(find_gsm8k(), "train")[:NUM_PROMPTS]
    prompts = [chat.encode_chat(row["prompt"]) for row in rows]
    assert len(prompts) == NUM_PROMPTS
    responses = greedy(smollm2, prompts, max_tokens=96, eos=chat.stop_ids())
    model = AutoModelForCausalLM.from_pretrained(smollm2, torch_dtype=torch.float32).eval()
    report = compare(model, prompts, responses)
    with capsys.disabled():
        print(f"\ngreedy on {NUM_PROMPTS} GSM8K prompts: {report}")
