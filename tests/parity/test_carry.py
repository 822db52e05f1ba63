"""Cutting a batch under a token budget changes neither loss nor gradients, however the cut trunk is treated.

Every case runs a whole update (actor loss included) against a dense padded batch in plain PyTorch, or against the
same update without a budget.
"""

from __future__ import annotations

import random

import pytest
import torch
from conftest import needs_smollm2
from models import write_model
from test_gradients import SHAPES, compare, config_json, random_batch

from banyan import _C

SHARING = "actor_rollout_ref__sharing__"
CARRIES = ["auto", "retain", "recompute", "replay"]


def budget_keys(budget: int, carry: str) -> dict:
    return {f"{SHARING}max_tokens_per_block": budget, f"{SHARING}carry": carry}


def longest_path(trajectories) -> int:
    return max(len(t["prompt"]) + len(t["response"]) for t in trajectories)


def some_budgets(seed: int, trajectories) -> list[int]:
    """One below the longest path, the longest path, one above it."""
    draw = random.Random(seed)
    longest = longest_path(trajectories)
    return [draw.randint(2, max(2, longest - 1)), longest, draw.randint(longest, 3 * longest)]


def run(path, dtype, trajectories, advantages, **changes):
    model = _C.Model.load(str(path), dtype, with_backward=True)
    result = _C.accumulate_gradients(model, config_json(**changes), trajectories, advantages)
    return result, {name: value.clone() for name, value in model.grads().items()}


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp64_gradients_under_a_budget_equal_dense(shape, carry, tmp_path):
    seed = SHAPES.index(shape) + 10 * CARRIES.index(carry)
    name = ["llama", "qwen2", "qwen3", "llama_untied"][seed % 4]
    _, path = write_model(name, tmp_path, seed)
    trajectories, advantages = random_batch(seed, shape)
    for budget in some_budgets(seed, trajectories):
        if carry == "replay" and budget < longest_path(trajectories):
            continue  # a path longer than the budget can only be cut with a carry
        compare(path, "fp64", trajectories, advantages, 1e-10, **budget_keys(budget, carry))


@pytest.mark.parametrize("carry", ["retain", "recompute"])
def test_fp32_gradients_under_a_budget_equal_dense(carry, tmp_path):
    _, path = write_model("qwen3", tmp_path)
    trajectories, advantages = random_batch(3, "deep")
    for budget in some_budgets(3, trajectories):
        keys = budget_keys(budget, carry)
        compare(path, "fp32", trajectories, advantages, 1e-5, floor=1e-7, **keys)


def test_a_budget_equal_to_the_longest_path_holds_each_token_once(tmp_path):
    """Nothing is replayed, no more tokens than the budget are alive, and the carry is freed as it closes."""
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(5, "deep")
    budget = longest_path(trajectories)
    result, _ = run(path, "bf16", trajectories, advantages, **budget_keys(budget, "retain"))
    assert result["num_blocks"] > 1
    assert result["computed_tokens"] == result["unique_tokens"]
    assert result["recomputed_tokens"] == 0
    assert result["peak_live_tokens"] <= budget
    layers, kv_heads, head_dim = 2, 2, 16
    per_token = layers * kv_heads * head_dim * 2 * (2 + 4)  # K and V in bf16, gradients in fp32
    assert 0 < result["peak_carry_bytes"] <= budget * per_token


def test_forward_bits_and_losses_do_not_depend_on_the_budget(tmp_path):
    _, path = write_model("qwen2", tmp_path)
    trajectories, advantages = random_batch(7, "deep")
    uncut, _ = run(path, "bf16", trajectories, advantages)
    exact, _ = run(path, "fp64", trajectories, advantages)
    for budget in range(20, 2 * longest_path(trajectories), 23):
        for carry in ("retain", "recompute"):
            keys = budget_keys(budget, carry)
            cut, _ = run(path, "bf16", trajectories, advantages, **keys)
            for ours, theirs in zip(cut["log_prob"], uncut["log_prob"], strict=True):
                assert torch.equal(ours, theirs)
            wide, _ = run(path, "fp64", trajectories, advantages, **keys)
            assert wide["loss"] == pytest.approx(exact["loss"], abs=1e-10)


def test_scores_under_a_budget_have_the_bits_of_an_uncut_pass(tmp_path):
    _, path = write_model("llama", tmp_path)
    trajectories, _ = random_batch(9, "deep")
    samples = [t["prompt"] + t["response"] for t in trajectories]
    model = _C.Model.load(str(path))
    whole = _C.score(model, samples)
    assert whole["num_blocks"] == 1
    for budget in (13, 40, 90):
        cut = _C.score(model, samples, max_tokens_per_block=budget)
        assert cut["num_blocks"] > 1
        for kind in ("logprobs", "entropy"):
            for ours, theirs in zip(cut[kind], whole[kind], strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("carry", ["retain", "recompute"])
def test_bits_of_cut_plans_repeat_over_runs_and_thread_counts(carry, tmp_path):
    _, path = write_model("qwen2", tmp_path)
    trajectories, advantages = random_batch(2, "deep")
    keys = budget_keys(longest_path(trajectories), carry)
    threads = _C.capabilities()["num_threads"]
    _, first = run(path, "bf16", trajectories, advantages, **keys)
    _, again = run(path, "bf16", trajectories, advantages, **keys)
    _C.set_num_threads(1)
    try:
        _, single = run(path, "bf16", trajectories, advantages, **keys)
    finally:
        _C.set_num_threads(threads)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, single[name]), name


def test_a_loss_of_the_whole_mini_batch_does_not_depend_on_the_budget(tmp_path):
    """clip_cov ranks the tokens of the mini-batch, so it must see all of them at once (A12 rule 5)."""
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(11, "two_levels")
    keys = {
        "actor_rollout_ref__actor__policy_loss__loss_mode": "clip_cov",
        "actor_rollout_ref__actor__policy_loss__clip_cov_ratio": 0.2,
        "actor_rollout_ref__actor__policy_loss__clip_cov_lb": 0.0,
        "actor_rollout_ref__actor__policy_loss__clip_cov_ub": 100.0,
    }
    uncut, wanted = run(path, "fp64", trajectories, advantages, **keys)
    for carry in ("retain", "recompute", "replay"):
        more = budget_keys(longest_path(trajectories), carry)
        cut, got = run(path, "fp64", trajectories, advantages, **keys, **more)
        assert cut["num_blocks"] > 1
        assert cut["loss"] == pytest.approx(uncut["loss"], abs=1e-10)
        for name, want in wanted.items():
            error = (got[name] - want).norm().item()
            assert error <= 1e-10 * want.norm().item() + 1e-12, name


def test_bf16_gradients_of_cut_plans_are_as_close_to_fp64_as_dense_ones(tmp_path):
    """Specification A16 item 2 with a carry: median over seeds of cut error / dense error per tensor class."""
    ratios: dict[str, list[float]] = {}
    for seed in range(7):
        _, path = write_model("llama", tmp_path / str(seed), seed)
        trajectories, advantages = random_batch(seed, "two_levels")
        _, exact = run(path, "fp64", trajectories, advantages)
        keys = budget_keys(longest_path(trajectories), "retain")
        _, cut = run(path, "bf16", trajectories, advantages, **keys)
        _, dense = run(path, "bf16", trajectories, advantages, **{f"{SHARING}mode": "off"})
        for name, want in exact.items():
            kind = name.split(".")[-2] if "layers" in name else name
            error = [(g[name].double() - want).norm().item() for g in (cut, dense)]
            ratios.setdefault(kind, []).append(error[0] / error[1])
    medians = {kind: sorted(values)[len(values) // 2] for kind, values in ratios.items()}
    assert max(medians.values()) <= 1.05, medians


@needs_smollm2
def test_smollm2_under_a_budget_of_its_longest_path(smollm2):
    """A whole model: forward bits as uncut, gradients within bf16's rounding, activations of one path."""
    draw = random.Random(0)
    prompt = [draw.randrange(1000, 40000) for _ in range(70)]
    trajectories = [
        {
            "row": 0,
            "index": index,
            "prompt": prompt,
            "response": [draw.randrange(1000, 40000) for _ in range(30 + index)],
            "response_mask": [1] * (30 + index),
        }
        for index in range(5)
    ]
    advantages = [0.7, -1.1, 0.4, 1.0, -0.6]
    budget = longest_path(trajectories)
    uncut, wanted = run(smollm2, "bf16", trajectories, advantages)
    cut, got = run(smollm2, "bf16", trajectories, advantages, **budget_keys(budget, "retain"))
    assert cut["num_blocks"] > 1
    assert cut["computed_tokens"] == uncut["unique_tokens"]
    for ours, theirs in zip(cut["log_prob"], uncut["log_prob"], strict=True):
        assert torch.equal(ours, theirs)
    for name, want in wanted.items():
        error = (got[name] - want).norm() / want.norm()
        assert error <= 2e-2, f"{name}: {error}"
    assert cut["peak_activation_bytes"] < 0.5 * uncut["peak_activation_bytes"]
    assert cut["peak_carry_bytes"] <= budget * 30 * 3 * 64 * 2 * (2 + 4)
