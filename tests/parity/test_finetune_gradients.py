"""SFT, DPO, IPO and the reward model: loss and gradients equal those of a dense padded batch in plain PyTorch."""

from __future__ import annotations

import json

import finetune_rows as rows_of
import pytest
import torch
from models import write_model

from banyan import _C

MODELS = ["llama", "qwen2", "qwen3", "llama_untied"]


def dense_weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone().requires_grad_() for name, value in model.params().items()}


def compare(model, weights, bound: float) -> None:
    """Gradients of the model against those of the dense weights."""
    grads = model.grads()
    for name, weight in weights.items():
        want = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        error = (grads[name] - want).norm().item()
        assert error <= bound * max(want.norm().item(), 1e-3), f"{name}: {error}"


def run(model, rows, trainer: str, **changes) -> dict:
    text = rows_of.config_json(trainer, **changes)
    return _C.finetune_gradients(model, text, rows_of.Host(rows), list(range(len(rows))))


def load(tmp_path, name: str, seed: int, dtype: str = "fp64", **changes):
    _, path = write_model(name, tmp_path, seed)
    model = _C.Model.load(str(path), dtype, with_backward=True, **changes)
    return path, model, json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("shape", ["turns", "resent", "masks", "branches", "nothing"])
@pytest.mark.parametrize("seed", [1, 2])
def test_sft_gradients_equal_dense(shape, seed, tmp_path):
    _, model, config = load(tmp_path, MODELS[(seed + len(shape)) % 4], seed)
    rows = rows_of.sft_rows(seed, shape)
    result = run(model, rows, "sft")
    weights = dense_weights(model)
    loss = rows_of.sft_loss(rows_of.scored_log_probs(weights, config, rows))
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-12)
    compare(model, weights, 1e-10)
    if shape != "nothing":
        assert result["unique_tokens"] < result["logical_tokens"]
    else:
        assert result["unique_tokens"] == result["logical_tokens"]


def test_a_history_sent_again_costs_no_token_more(tmp_path):
    """Each turn a sample of its own has the loss, the gradients and the unique tokens of whole chats."""
    _, model, _ = load(tmp_path, "llama", 3)
    whole = run(model, rows_of.sft_rows(7, "turns"), "sft")
    want = {name: value.clone() for name, value in model.grads().items()}
    resent = run(model, rows_of.sft_rows(7, "resent"), "sft")
    assert resent["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    assert resent["weight"] == whole["weight"]
    assert resent["unique_tokens"] == whole["unique_tokens"]
    assert resent["logical_tokens"] > 1.5 * whole["logical_tokens"]
    for name, value in model.grads().items():
        assert (value - want[name]).norm() <= 1e-10 * want[name].norm().clamp(min=1e-3), name


def test_a_token_scored_by_some_samples_only_counts_for_those(tmp_path):
    """Masks that differ on one node: the gradient weighs it by the samples that score it, by no more."""
    _, model, config = load(tmp_path, "qwen3", 4)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    rows = [
        [(tokens, [0, 0, 0, 1, 1, 0, 0, 1])],
        [(tokens, [0, 0, 0, 0, 1, 0, 0, 1])],
        [(tokens[:5], [0, 0, 0, 0, 1])],
    ]
    result = run(model, rows, "sft")
    assert (result["unique_tokens"], result["weight"]) == (8, 6)
    weights = dense_weights(model)
    rows_of.sft_loss(rows_of.scored_log_probs(weights, config, rows)).backward()
    compare(model, weights, 1e-10)


@pytest.mark.parametrize("budget", [7, 13, 30])
@pytest.mark.parametrize("mode", ["off", "retain", "recompute", "replay"])
@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_gradients_do_not_depend_on_cuts_or_sharing(budget, mode, trainer, tmp_path):
    _, model, _ = load(tmp_path, "llama", 5)
    rows = rows_of.sft_rows(3, "branches") if trainer == "sft" else rows_of.pair_rows(3)
    keys = {} if trainer == "sft" else {"preference__reference_free": True}
    whole = run(model, rows, trainer, **keys)
    want = {name: value.clone() for name, value in model.grads().items()}
    keys["data__max_token_len_per_gpu"] = budget
    keys["sharing__mode" if mode == "off" else "sharing__carry"] = mode
    cut = run(model, rows, trainer, **keys)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    for name, value in model.grads().items():
        assert (value - want[name]).norm() <= 1e-10 * want[name].norm().clamp(min=1e-3), name


@pytest.mark.parametrize("objective", ["dpo", "ipo"])
@pytest.mark.parametrize("precomputed", [False, True])
def test_preference_gradients_equal_dense(objective, precomputed, tmp_path):
    _, model, config = load(tmp_path / "policy", "llama", 6, "fp64")
    reference_path, reference, _ = load(tmp_path / "reference", "llama", 7, "fp64")
    rows = rows_of.pair_rows(6)
    text = rows_of.tree(
        "dpo",
        len(rows),
        preference__objective=objective,
        preference__beta=0.3,
        preference__label_smoothing=0.1 if objective == "dpo" else 0.0,
        preference__reference_path=reference_path,
        preference__precompute_ref_log_probs=precomputed,
    )
    text["engine"]["dtype"] = "float64"  # of the reference; no user's choice
    order = [4, 0, 6, 2, 1]
    result = _C.finetune_gradients(model, json.dumps(text), rows_of.Host(rows), order)
    rows = [rows[row] for row in order]
    weights = dense_weights(model)
    policy = rows_of.scored_log_probs(weights, config, rows)
    with torch.no_grad():
        before = rows_of.scored_log_probs(reference.params(), config, rows)
    smoothing = text["preference"]["label_smoothing"]
    loss, margins = rows_of.preference_loss(policy, before, objective, 0.3, smoothing)
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-11)
    assert result["rewards/margins"] == pytest.approx(margins.mean().item(), rel=1e-10)
    assert result["rewards/accuracies"] == (margins > 0).double().mean().item()
    compare(model, weights, 1e-10)


def test_reward_model_gradients_equal_dense(tmp_path):
    _, model, config = load(tmp_path, "qwen2", 8, head="value")
    rows = rows_of.pair_rows(9)
    result = run(
        model,
        rows,
        "dpo",
        preference__objective="reward_model",
        preference__center_rewards_coefficient=0.05,
    )
    weights = dense_weights(model)
    chosen, rejected = rows_of.rewards(weights, config, rows).unbind(1)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    loss = loss + 0.05 * ((chosen + rejected) ** 2).mean()
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-11)
    assert result["rewards/margins"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-9)
    compare(model, {name: value for name, value in weights.items() if name != "score.bias"}, 1e-10)
