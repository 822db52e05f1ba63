"""Logits equal transformers': fp32 within 1e-4, bf16 no further from fp32 than transformers' own bf16."""

from __future__ import annotations

import pytest
import torch
from conftest import needs_smollm2
from models import CONFIGS, new_style_rope, random_samples, write_model
from transformers import AutoModelForCausalLM

from banyan import _C


def reference_logits(model: torch.nn.Module, samples: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([sample])).logits[0].float() for sample in samples]


def rms(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    difference = torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)])
    return difference.double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rope_keys", ["old", "new"])
def test_fp32_logits_equal_transformers(name, rope_keys, tmp_path):
    model, path = write_model(name, tmp_path)
    if rope_keys == "new":
        new_style_rope(path)
    samples = random_samples(1, 131)
    expected = reference_logits(model, samples)
    got = _C.logits(_C.Model.load(str(path), "fp32"), samples)
    for want, have in zip(expected, got, strict=True):
        torch.testing.assert_close(have, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kernels", ["native", "aten"])
def test_bf16_logits_are_as_close_as_transformers_bf16(name, kernels, tmp_path):
    model, path = write_model(name, tmp_path)
    samples = random_samples(2, 131)
    exact = reference_logits(model, samples)
    theirs = reference_logits(
        AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16), samples
    )
    ours = _C.logits(_C.Model.load(str(path), "bf16", kernels=kernels), samples)
    assert rms(ours, exact) <= 1.1 * rms(theirs, exact)


def test_sharing_does_not_change_a_bit_of_bf16_logits(tmp_path):
    _, path = write_model("llama", tmp_path)
    model = _C.Model.load(str(path), "bf16")
    samples = random_samples(3, 131)
    for on, off in zip(
        _C.logits(model, samples, True), _C.logits(model, samples, False), strict=True
    ):
        assert torch.equal(on, off)


@needs_smollm2
def test_smollm2_logits(smollm2):
    text = list(range(100, 160))
    samples = [[*text, 7, 8, 9], [*text, 300, 301], text[:20]]
    exact = reference_logits(
        AutoModelForCausalLM.from_pretrained(smollm2, torch_dtype=torch.float32), samples
    )
    ours = _C.logits(_C.Model.load(str(smollm2), "fp32"), samples)
    for want, have in zip(exact, ours, strict=True):
        torch.testing.assert_close(have, want, atol=5e-4, rtol=0)
    theirs = reference_logits(
        AutoModelForCausalLM.from_pretrained(smollm2, torch_dtype=torch.bfloat16), samples
    )
    assert rms(_C.logits(_C.Model.load(str(smollm2), "bf16"), samples), exact) <= 1.1 * rms(
        theirs, exact
    )
