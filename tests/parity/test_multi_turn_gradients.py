"""The actor's gradients on agentic batches: several scored turns, histories sent again, rollouts that branch anywhere.

The oracle pads and shares nothing; fp64, 1e-10.
"""

from __future__ import annotations

import random

import pytest
from finetune_rows import sft_rows
from models import write_model
from test_gradients import compare, config_json

from banyan import _C


def trajectories_of(seed: int, shape: str) -> tuple[list[dict], list[float]]:
    """Trajectories of finetune_rows' shapes: the prompt ends before the first scored token."""
    draw = random.Random(seed)
    out = []
    for row, samples in enumerate(sft_rows(seed, shape)):
        for index, (tokens, scored) in enumerate(samples):
            first = max(1, scored.index(1))
            item = {"row": row, "index": index, "prompt": tokens[:first]}
            out.append({**item, "response": tokens[first:], "response_mask": scored[first:]})
    kept = [item for item in out if any(item["response_mask"])]
    return kept, [draw.gauss(0, 1) for _ in kept]


@pytest.mark.parametrize("shape", ["turns", "resent", "masks", "branches"])
@pytest.mark.parametrize("budget", [16384, 12])
def test_actor_gradients_equal_dense(shape, budget, tmp_path):
    _, path = write_model("qwen3", tmp_path, 1)
    trajectories, advantages = trajectories_of(11, shape)
    result = compare(
        path,
        "fp64",
        trajectories,
        advantages,
        1e-10,
        actor_rollout_ref__actor__ppo_max_token_len_per_gpu=budget,
        actor_rollout_ref__actor__entropy_coeff=0.05,
    )
    assert result["unique_tokens"] < result["logical_tokens"]


def test_one_advantage_for_all_turns_makes_both_forms_of_a_chat_equal(tmp_path):
    """A chat as one sample with several turns, and the same chat sent again for every turn."""
    _, path = write_model("llama", tmp_path, 2)
    model = _C.Model.load(str(path), "fp64", with_backward=True)
    found = []
    for shape in ("turns", "resent"):
        trajectories, _ = trajectories_of(5, shape)
        advantages = [0.5 + item["row"] for item in trajectories]
        result = _C.accumulate_gradients(model, config_json(), trajectories, advantages)
        grads = {name: value.clone() for name, value in model.grads().items()}
        found.append((result, grads))
    (whole, want), (resent, have) = found
    assert resent["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    assert resent["unique_tokens"] == whole["unique_tokens"]
    assert resent["logical_tokens"] > whole["logical_tokens"]
    for name, value in want.items():
        assert (have[name] - value).norm() <= 1e-10 * value.norm().clamp(min=1e-3), name
