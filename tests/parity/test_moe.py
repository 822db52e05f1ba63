"""Qwen3-MoE equals transformers, dense and on tries; auxiliary losses count logical tokens; a run trains it."""

from __future__ import annotations

import json

import oracle
import pytest
import torch
from models import random_samples, write_model
from test_gradients import compare, config_json, random_batch

from banyan import _C

OVERRIDE = "actor_rollout_ref__actor__megatron__override_transformer_config"


def layers(path) -> tuple[dict, list[int]]:
    config = json.loads((path / "config.json").read_text())
    return config, [i for i in range(config["num_hidden_layers"]) if oracle.has_experts(config, i)]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_mixed"])
def test_fp32_gradients_equal_transformers(name, tmp_path):
    """One sample, so that padding plays no part: plain autograd through Qwen3MoeForCausalLM."""
    theirs, path = write_model(name, tmp_path)
    sample = random_samples(4, 131)[4]
    trajectory = {"row": 0, "index": 0, "prompt": sample[:9], "response": sample[9:]}
    model = _C.Model.load(str(path), "fp32", with_backward=True)
    _C.accumulate_gradients(model, config_json(), [trajectory], [0.7])
    ids = torch.tensor(sample)
    table = theirs(ids[None]).logits[0, :-1].double().log_softmax(-1)
    new = table.gather(-1, ids[1:, None])[8:, 0]
    (-0.7 * (new - new.detach()).exp()).mean().backward()
    wanted = {key: value.grad for key, value in theirs.named_parameters()}
    grads = model.grads()
    assert grads.keys() == wanted.keys()
    for key, grad in grads.items():
        want = torch.zeros_like(grad) if wanted[key] is None else wanted[key]
        assert (grad - want).norm() <= 1e-3 * want.norm() + 1e-7, key


@pytest.mark.parametrize("shape", ["two_levels", "deep", "duplicates", "prefix", "none_shared"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_mixed"])
def test_fp64_gradients_equal_dense(name, shape, tmp_path):
    _, path = write_model(name, tmp_path)
    compare(path, "fp64", *random_batch(3, shape), 1e-10)


@pytest.mark.parametrize("limit", [1, 3])
def test_gradients_do_not_depend_on_the_micro_batch(limit, tmp_path):
    _, path = write_model("qwen3_moe_mixed", tmp_path)
    limits = {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": limit}
    compare(path, "fp64", *random_batch(9, "deep"), 1e-10, **limits)


def test_bf16_bits_do_not_depend_on_sharing(tmp_path):
    _, path = write_model("qwen3_moe_mixed", tmp_path)
    model = _C.Model.load(str(path), "bf16")
    samples = random_samples(3, 131)
    for on, off in zip(
        _C.logits(model, samples, True), _C.logits(model, samples, False), strict=True
    ):
        assert torch.equal(on, off)


def auxiliary(weights, config, samples, balance: float, z: float) -> torch.Tensor:
    """The two losses over all tokens of all samples, each computed as often as it stands there."""
    routed: dict[int, list[torch.Tensor]] = {}
    for sample in samples:
        oracle.hidden_states(weights, config, torch.tensor([sample]), routed)
    total = torch.zeros((), dtype=torch.float64)
    for logits in map(torch.cat, routed.values()):
        chosen = logits.softmax(-1).topk(config["num_experts_per_tok"], -1).indices
        experts = config["num_experts"]
        share = torch.bincount(chosen.flatten(), minlength=experts).double() / chosen.numel()
        total = total + balance * experts * (share * logits.softmax(-1).mean(0)).sum()
        total = total + z * logits.logsumexp(-1).square().mean()
    return total


@pytest.mark.parametrize(
    ("mode", "limit", "carry"),
    [
        ("on", None, "auto"),
        ("off", None, "auto"),
        ("off", 2, "auto"),
        ("on", 2, "auto"),
        ("on", 2, "replay"),
        ("on", 2, "recompute"),
    ],
)
def test_auxiliary_losses_count_logical_tokens(mode, limit, carry, tmp_path):
    _, path = write_model("qwen3_moe_mixed", tmp_path)
    trajectories, advantages = random_batch(9, "deep")
    keys = {"actor_rollout_ref__sharing__mode": mode, "actor_rollout_ref__sharing__carry": carry}
    if limit:
        keys["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = limit
    losses = {f"{OVERRIDE}__moe_aux_loss_coeff": 0.3, f"{OVERRIDE}__moe_z_loss_coeff": 0.05}
    found = []
    for more in ({}, losses):
        model = _C.Model.load(str(path), "fp64", with_backward=True)
        result = _C.accumulate_gradients(
            model, config_json(**keys, **more), trajectories, advantages
        )
        found.append({name: grad.clone() for name, grad in model.grads().items()})
    weights = {name: value.clone().requires_grad_() for name, value in model.params().items()}
    config, _ = layers(path)
    wanted = auxiliary(
        weights, config, [t["prompt"] + t["response"] for t in trajectories], 0.3, 0.05
    )
    wanted.backward()
    assert result["routers"]["loss"] == pytest.approx(wanted.item(), rel=1e-10)
    for name, weight in weights.items():
        want = torch.zeros_like(weight) if weight.grad is None else weight.grad
        error = (found[1][name] - found[0][name] - want).norm()
        assert error <= 1e-10 * want.norm() + 1e-12, name
    gate = f"model.layers.{layers(path)[1][0]}.mlp.gate.weight"
    assert weights[gate].grad.norm() > 0


def test_the_router_may_compute_in_fp64(tmp_path):
    """The key is the trainer's; a word that means nothing is refused."""
    _, path = write_model("qwen3_moe", tmp_path)
    model = _C.Model.load(str(path), "fp64", with_backward=True)
    text = config_json().replace('"moe_router_dtype": "fp32"', '"moe_router_dtype": "bf16"')
    with pytest.raises(ValueError, match="moe_router_dtype: wanted fp32 or fp64, got bf16"):
        _C.accumulate_gradients(model, text, *random_batch(1, "deep"))


def test_what_is_saved_is_what_transformers_reads(tmp_path):
    from transformers import AutoModelForCausalLM

    _, path = write_model("qwen3_moe_mixed", tmp_path)
    model = _C.Model.load(str(path), "fp32")
    model.save(str(tmp_path / "saved"), str(path), "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", torch_dtype=torch.float32)
    params = model.params()
    assert params.keys() == dict(theirs.named_parameters()).keys()
    for key, value in theirs.named_parameters():
        assert torch.equal(params[key], value), key
