"""The whole program on any device LibTorch has, through the plain operators (`tools/device_check.sh`).

Without an accelerator the same checks run on the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parity"))

from models import random_samples, write_model
from test_step import run

from banyan import _C

DEVICE = os.environ.get("BANYAN_TEST_DEVICE", "cpu")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_logits_on_the_device(name, tmp_path):
    _, path = write_model(name, tmp_path)
    samples = random_samples(4, 131)
    here = _C.logits(_C.Model.load(str(path), "fp64"), samples)
    there = _C.logits(_C.Model.load(str(path), "fp32", device=DEVICE, kernels="aten"), samples)
    for want, have in zip(here, there, strict=True):
        torch.testing.assert_close(have.cpu().double(), want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_grpo_step_on_the_device(dtype, tmp_path):
    _, path = write_model("llama", tmp_path)
    host, _, summary = run(
        path,
        tmp_path / "run",
        **{
            "banyan.kernels": "aten",
            "trainer.device": DEVICE,
            "actor_rollout_ref.rollout.dtype": dtype,
            "actor_rollout_ref.sharing.max_tokens_per_block": 24,  # so that blocks carry
            "actor_rollout_ref.sharing.carry": "recompute",
        },
    )
    assert summary["last_step"] == 1
    assert host.metrics[-1]["trie/blocks"] > 1
    assert host.metrics[-1]["trie/carry_bytes_max"] > 0
    assert host.metrics[-1]["actor/grad_norm"] > 0
    assert host.metrics[-1]["training/rollout_probs_diff_max"] < (
        1e-3 if dtype == "float32" else 0.05
    )
