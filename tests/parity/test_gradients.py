"""Loss and gradients of a planned update equal those of a dense padded batch in plain PyTorch."""

from __future__ import annotations

import json
import random

import oracle
import pytest
import torch
from conftest import needs_smollm2
from models import CONFIGS, write_model

from banyan import _C

VOCAB = 131


def config_json(**changes) -> str:
    """A resolved tree with what the core reads; `changes` are dotted keys."""
    from banyan.config.resolve import resolve

    overrides = [
        f"{key.replace('__', '.')}={'null' if value is None else value}"
        for key, value in changes.items()
    ]
    base = [
        "data.train_files=unused.jsonl",
        "actor_rollout_ref.model.path=unused",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
    ]
    tree = resolve([*base, *overrides]).tree
    tree["_shell"] = {"num_train_rows": 1, "stop_ids": [0], "model_dir": "unused"}
    return json.dumps(tree)


def random_batch(seed: int, shape: str) -> tuple[list[dict], list[float]]:
    """Trajectories on a random tree of prompts, with advantages. Shapes: what the specification calls edge cases."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(1, VOCAB) for _ in range(draw.randint(low, high))]

    trunks = [[draw.randrange(1, VOCAB)] if shape != "none_shared" else []]
    for _ in range({"deep": 6}.get(shape, 2)):
        trunks = [trunk + ids(1, 9) for trunk in trunks for _ in range(draw.randint(1, 2))]
    trajectories = []
    for row, trunk in enumerate(trunks):
        prompt = ids(2, 20) if shape == "none_shared" else trunk
        for index in range(draw.randint(1, 4)):
            response = ids(1, 1) if shape == "one_token" else ids(1, 30)
            if shape == "all_shared":
                response = [5, 6, 7, 8]
            if shape == "prefix" and index > 0:
                response = trajectories[-1]["response"] + ids(0, 4)
            if shape == "duplicates" and index > 0:
                response = list(trajectories[-1]["response"])
            mask = [1 if draw.random() < 0.8 else 0 for _ in response]
            mask[-1] = 1
            if shape == "empty_response" and index == 0 and row > 0:
                response, mask = [], []
            trajectories.append(
                {
                    "row": row,
                    "index": index,
                    "prompt": prompt,
                    "response": response,
                    "response_mask": mask,
                }
            )
    kept = [t for t in trajectories if t["response"]] if shape != "empty_response" else trajectories
    return kept, [draw.gauss(0, 1) for _ in kept]


def dense_loss(weights, config, trajectories, advantages, old, ref, tree) -> torch.Tensor:
    """The actor loss in plain PyTorch (algorithms specification sections 5, 8 and 9)."""
    actor = tree["actor_rollout_ref"]["actor"]
    log_prob, entropy = oracle.log_probs(
        weights,
        config,
        [t["prompt"] + t["response"] for t in trajectories],
        tree["actor_rollout_ref"]["rollout"]["temperature"],
    )
    terms = []
    for i, trajectory in enumerate(trajectories):
        begin = len(trajectory["prompt"]) - 1
        mask = torch.tensor(trajectory["response_mask"], dtype=torch.bool)
        new, ent = log_prob[i][begin:][mask], entropy[i][begin:][mask]
        before = old[i].to(new) if old else new.detach()
        ratio = (new - before).exp()
        clipped = ratio.clamp(1 - actor["clip_ratio"], 1 + actor["clip_ratio"])
        loss = torch.maximum(-advantages[i] * ratio, -advantages[i] * clipped)
        if advantages[i] < 0:
            loss = torch.minimum(
                loss, torch.full_like(loss, -advantages[i] * actor["clip_ratio_c"])
            )
        loss = loss - actor["entropy_coeff"] * ent
        if actor["use_kl_loss"]:
            gap = ref[i].to(new) - new
            loss = loss + actor["kl_loss_coef"] * (gap.exp() - gap - 1).clamp(-10, 10)
        terms.append(loss)
    terms = [term for term in terms if len(term)]
    mode = actor["loss_agg_mode"] or "token-mean"
    if mode == "token-mean":
        return torch.cat(terms).mean()
    if mode == "token-sum":
        return torch.cat(terms).sum()
    per_sample = [term.mean() if mode == "seq-mean-token-mean" else term.sum() for term in terms]
    total = torch.stack(per_sample).mean()
    norm = tree["actor_rollout_ref"]["rollout"]["response_length"]
    return total / norm if mode == "seq-mean-token-sum-norm" else total


def compare(
    path, dtype, trajectories, advantages, bound, old=None, ref=None, floor=1e-12, **changes
):
    """Asserts that loss and every gradient agree within `bound` (relative L2 per tensor, absolute floor)."""
    text = config_json(**changes)
    tree = json.loads(text)
    model = _C.Model.load(str(path), dtype, with_backward=True)
    result = _C.accumulate_gradients(model, text, trajectories, advantages, old or [], ref or [])
    wide = torch.float64
    weights = {
        name: value.detach().to(wide).requires_grad_() for name, value in model.params().items()
    }
    config = json.loads((path / "config.json").read_text())
    loss = dense_loss(weights, config, trajectories, advantages, old, ref, tree)
    loss.backward()
    assert abs(result["loss"] - loss.item()) <= bound * max(1.0, abs(loss.item()))
    grads = model.grads()
    assert grads.keys() == weights.keys()
    for name, weight in weights.items():
        want = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        error = (grads[name].to(wide) - want).norm().item()
        assert error <= bound * want.norm().item() + floor, (
            f"{name}: {error} against {want.norm().item()}"
        )
    return result


SHAPES = [
    "two_levels",
    "deep",
    "none_shared",
    "all_shared",
    "duplicates",
    "prefix",
    "one_token",
    "empty_response",
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_fp64_gradients_equal_dense(shape, seed, tmp_path):
    name = ["llama", "qwen2", "qwen3", "llama_untied"][(seed + SHAPES.index(shape)) % 4]
    _, path = write_model(name, tmp_path, seed)
    trajectories, advantages = random_batch(seed, shape)
    result = compare(path, "fp64", trajectories, advantages, 1e-10)
    if shape in ("two_levels", "deep", "all_shared", "duplicates"):
        assert result["unique_tokens"] < result["logical_tokens"]


@pytest.mark.parametrize("shape", ["two_levels", "deep", "prefix"])
def test_fp32_gradients_equal_dense(shape, tmp_path):
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(3, shape)
    compare(path, "fp32", trajectories, advantages, 1e-5, floor=1e-7)


@pytest.mark.parametrize(
    "mode",
    [
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ],
)
def test_every_term_of_the_loss(mode, tmp_path):
    _, path = write_model("qwen3", tmp_path)
    trajectories, advantages = random_batch(5, "two_levels")
    model = _C.Model.load(str(path), "fp64")
    base = _C.score(model, [t["prompt"] + t["response"] for t in trajectories])["logprobs"]
    draw = torch.Generator().manual_seed(1)
    old, ref = [], []
    for trajectory, log_prob in zip(trajectories, base, strict=True):
        mask = torch.tensor(trajectory["response_mask"], dtype=torch.bool)
        own = log_prob[len(trajectory["prompt"]) - 1 :][mask]
        old.append(own + 0.4 * torch.randn(own.shape, generator=draw, dtype=own.dtype))
        ref.append(own + 0.4 * torch.randn(own.shape, generator=draw, dtype=own.dtype))
    compare(
        path,
        "fp64",
        trajectories,
        advantages,
        1e-10,
        old=old,
        ref=ref,
        actor_rollout_ref__actor__loss_agg_mode=mode,
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__kl_loss_coef=0.2,
        actor_rollout_ref__actor__entropy_coeff=0.1,
        actor_rollout_ref__rollout__temperature=0.7,
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_gradients_do_not_depend_on_the_micro_batch(limit, tmp_path):
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(9, "deep")
    compare(
        path,
        "fp64",
        trajectories,
        advantages,
        1e-10,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=limit,
    )


def gradients(path, mode, trajectories, advantages, dtype="bf16"):
    model = _C.Model.load(str(path), dtype, with_backward=True)
    text = config_json(actor_rollout_ref__sharing__mode=mode)
    _C.accumulate_gradients(model, text, trajectories, advantages)
    return {name: value.clone() for name, value in model.grads().items()}


def test_bf16_gradients_of_sharing_are_as_close_to_fp64_as_dense_ones(tmp_path):
    """Specification A16 item 2: median over seeds of shared error / dense error at most 1.05 per tensor class."""
    ratios: dict[str, list[float]] = {}
    for seed in range(7):
        _, path = write_model("llama", tmp_path / str(seed), seed)
        trajectories, advantages = random_batch(seed, "two_levels")
        exact = gradients(path, "on", trajectories, advantages, "fp64")
        shared, dense = (gradients(path, mode, trajectories, advantages) for mode in ("on", "off"))
        for name, want in exact.items():
            kind = name.split(".")[-2] if "layers" in name else name
            error = [(g[name].double() - want).norm().item() for g in (shared, dense)]
            ratios.setdefault(kind, []).append(error[0] / error[1])
    medians = {kind: sorted(values)[len(values) // 2] for kind, values in ratios.items()}
    assert max(medians.values()) <= 1.05, medians


def test_bf16_gradients_repeat_bit_for_bit_over_runs_and_threads(tmp_path):
    _, path = write_model("qwen2", tmp_path)
    trajectories, advantages = random_batch(2, "deep")
    threads = _C.capabilities()["num_threads"]
    first = gradients(path, "on", trajectories, advantages)
    again = gradients(path, "on", trajectories, advantages)
    _C.set_num_threads(1)
    try:
        single = gradients(path, "on", trajectories, advantages)
    finally:
        _C.set_num_threads(threads)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, single[name]), name


@needs_smollm2
def test_smollm2_gradients_equal_transformers(smollm2):
    """fp32, whole model: plain PyTorch over transformers with log-softmax and loss in fp64."""
    from transformers import AutoModelForCausalLM

    draw = random.Random(0)
    prompt = [draw.randrange(1000, 40000) for _ in range(40)]
    trajectories = [
        {
            "row": 0,
            "index": index,
            "prompt": prompt,
            "response": [draw.randrange(1000, 40000) for _ in range(12 + index)],
            "response_mask": [1] * (12 + index),
        }
        for index in range(3)
    ]
    advantages = [0.7, -1.1, 0.4]
    model = _C.Model.load(str(smollm2), "fp32", with_backward=True)
    _C.accumulate_gradients(model, config_json(), trajectories, advantages)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, torch_dtype=torch.float32)
    terms = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        ids = torch.tensor(trajectory["prompt"] + trajectory["response"])
        table = theirs(ids[None]).logits[0, :-1].double().log_softmax(-1)
        new = table.gather(-1, ids[1:, None])[len(prompt) - 1 :, 0]
        terms.append(-advantage * (new - new.detach()).exp())
    torch.cat(terms).mean().backward()
    for name, value in theirs.named_parameters():
        error = (model.grads()[name] - value.grad).norm() / value.grad.norm()
        assert error <= 1e-4, f"{name}: {error}"


@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if config.rope_scaling is None]
)
def test_oracle_equals_transformers(name, tmp_path):
    """The oracle itself: its log-probabilities are those of transformers in fp32."""
    model, path = write_model(name, tmp_path)
    config = json.loads((path / "config.json").read_text())
    weights = {key: value.detach() for key, value in model.named_parameters()}
    sample = [3, 5, 7, 11, 13, 17, 19, 23]
    ours = oracle.log_probs(weights, config, [sample])[0][0]
    ids = torch.tensor(sample)
    with torch.no_grad():
        table = model(ids[None]).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(ours, table.gather(-1, ids[1:, None])[:, 0], atol=2e-5, rtol=0)
