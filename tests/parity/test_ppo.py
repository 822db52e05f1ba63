"""PPO against plain PyTorch in fp64: the critic's gradients, GAE, and one whole step of actor and critic."""

from __future__ import annotations

import copy
import json

import oracle
import pytest
import torch
from models import CONFIGS, write_model
from safetensors.torch import load_file
from test_gradients import config_json, dense_loss, random_batch
from test_step import Host, run

from banyan import _C

CRITIC_MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


def mask_of(trajectory: dict) -> torch.Tensor:
    return torch.tensor(trajectory["response_mask"], dtype=torch.bool)


def dense_values(weights, config, trajectories) -> list[torch.Tensor]:
    """Values of the masked response tokens, each read at the row that predicts the token."""
    samples = [t["prompt"] + t["response"] for t in trajectories]
    ids = torch.zeros((len(samples), max(map(len, samples))), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
    hidden = oracle.hidden_states(weights, config, ids)
    values = hidden @ weights["score.weight"][0] + weights["score.bias"]
    out = []
    for row, t in enumerate(trajectories):
        begin = len(t["prompt"]) - 1
        out.append(values[row, begin : begin + len(t["response"])][mask_of(t)])
    return out


def dense_value_loss(values, old, returns, mode, clip, norm) -> torch.Tensor:
    """0.5 agg(max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)) (algorithms specification section 10)."""
    terms = []
    for new, before, target in zip(values, old, returns, strict=True):
        near = torch.clamp(new, before - clip, before + clip)
        terms.append(0.5 * torch.maximum((new - target) ** 2, (near - target) ** 2))
    terms = [term for term in terms if len(term)]
    if mode == "token-mean":
        return torch.cat(terms).mean()
    if mode == "token-sum":
        return torch.cat(terms).sum()
    per_sample = [term.mean() if mode == "seq-mean-token-mean" else term.sum() for term in terms]
    total = torch.stack(per_sample).mean()
    return total / norm if mode == "seq-mean-token-sum-norm" else total


def value_model(name: str, directory, seed: int = 0):
    """A random model with a value head, on disk."""
    _, path = write_model(name, directory, seed)
    model = _C.Model.load(str(path), "fp64", with_backward=True, head="value")
    with torch.no_grad():
        model.params()["score.weight"].mul_(5.0)
        model.params()["score.bias"].fill_(0.3)
    model.save(str(directory / "value"), str(path), "fp64")
    return directory / "value"


def wide(model) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().double().clone().requires_grad_()
        for name, value in model.params().items()
    }


def check_grads(model, weights, bound: float) -> None:
    grads = model.grads()
    assert grads.keys() == weights.keys()
    for name, weight in weights.items():
        want = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        error = (grads[name].double() - want).norm().item()
        assert error <= bound * want.norm().item() + 1e-12, f"{name}: {error}"


@pytest.mark.parametrize("mode", CRITIC_MODES)
@pytest.mark.parametrize(
    ("shape", "budget"), [("two_levels", 4096), ("deep", 40), ("duplicates", 30), ("prefix", 25)]
)
def test_critic_gradients_equal_dense(mode, shape, budget, tmp_path):
    """Masks with gaps (several turns), shared tokens with targets of their own, values inside and beyond the clip."""
    path = value_model("qwen3", tmp_path, CRITIC_MODES.index(mode))
    trajectories, _ = random_batch(CRITIC_MODES.index(mode), shape)
    model = _C.Model.load(str(path), "fp64", with_backward=True, head="value")
    weights = wide(model)
    config = json.loads((path / "config.json").read_text())
    values = dense_values(weights, config, trajectories)
    draw = torch.Generator().manual_seed(5)

    def near(value: torch.Tensor, spread: float) -> torch.Tensor:
        noise = torch.randn(value.shape, generator=draw, dtype=torch.float64)
        return (value.detach() + spread * noise).contiguous()

    old = [near(value, 0.4) for value in values]
    returns = [near(value, 1.0) for value in values]
    text = config_json(
        critic__loss_agg_mode=mode,
        critic__cliprange_value=0.3,
        critic__ppo_max_token_len_per_gpu=budget,
    )
    result = _C.accumulate_value_gradients(model, text, trajectories, old, returns)
    norm = json.loads(text)["actor_rollout_ref"]["rollout"]["response_length"]
    loss = dense_value_loss(values, old, returns, mode, 0.3, norm)
    loss.backward()
    assert abs(result["loss"] - loss.item()) <= 1e-10 * max(1.0, abs(loss.item()))
    assert 0 < result["clipped_tokens"] < result["num_tokens"]
    check_grads(model, weights, 1e-10)


def gae(rewards, values, gamma, lam):
    """Advantages (not whitened) and returns of one response's masked tokens, last to first."""
    advantages, last, after = [], 0.0, 0.0
    for reward, value in reversed(list(zip(rewards, values, strict=True))):
        last = reward + gamma * after - value + gamma * lam * last
        after = value
        advantages.append(last)
    advantages = torch.tensor(advantages[::-1], dtype=torch.float64)
    return advantages, advantages + torch.tensor(values, dtype=torch.float64)


def adamw_change(weights, optim, lr):
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), optim["clip_grad"])
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    torch.optim.AdamW(
        weights.values(), lr=lr, betas=tuple(optim["betas"]), weight_decay=optim["weight_decay"]
    ).step()
    return norm.item(), {name: weights[name].detach() - before[name] for name in weights}


def check_changes(folder, start, wanted) -> None:
    after = load_file(f"{folder}/state/master.safetensors")
    for name, want in wanted.items():
        got = after[name].double() - start[name].double()
        assert want.norm() > 0, name
        assert (got - want).norm() <= 1e-6 * want.norm(), name


def test_one_step_of_actor_and_critic(tmp_path):
    _, path = write_model("llama", tmp_path)
    critic = value_model("llama", tmp_path / "critic", seed=3)
    host, tree, summary = run(
        path,
        tmp_path / "run",
        dtype="float64",
        **{
            "algorithm.adv_estimator": "gae",
            "algorithm.gamma": 0.98,
            "algorithm.lam": 0.9,
            "critic.model.path": str(critic),
            "critic.optim.lr": 2e-3,
        },
    )
    trajectories = host.trajectories
    by_key = {(s["row"], s["index"]): s["value"] for s in host.scores}
    value_weights = wide(_C.Model.load(str(critic), "fp64", head="value"))
    values = dense_values(
        value_weights, json.loads((critic / "config.json").read_text()), trajectories
    )
    advantages, returns = [], []
    for t, value in zip(trajectories, values, strict=True):
        rewards = [0.0] * len(value)
        rewards[-1] = by_key[t["row"], t["index"]]
        advantage, target = gae(rewards, value.tolist(), 0.98, 0.9)
        advantages.append(advantage)
        returns.append(target)
    every = torch.cat(advantages)
    scale = (every.var(unbiased=True) + 1e-8).rsqrt()
    advantages = [(advantage - every.mean()) * scale for advantage in advantages]

    metrics = host.metrics[-1]
    assert metrics["critic/values/mean"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-9)
    assert metrics["critic/returns/max"] == pytest.approx(torch.cat(returns).max().item(), rel=1e-9)
    assert metrics["critic/advantages/min"] == pytest.approx(torch.cat(advantages).min().item())

    old = [value.detach() for value in values]
    loss = dense_value_loss(values, old, returns, "token-mean", 0.5, 1.0)
    loss.backward()
    assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-9)
    start = {name: weight.detach().clone() for name, weight in value_weights.items()}
    norm, change = adamw_change(value_weights, tree["critic"]["optim"], 2e-3)
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-9)
    check_changes(f"{summary['checkpoint']}/critic", start, change)

    weights = wide(_C.Model.load(str(path), "fp64"))
    config = json.loads((path / "config.json").read_text())
    loss = policy_loss(weights, config, trajectories, advantages)
    loss.backward()
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    norm, change = adamw_change(weights, tree["actor_rollout_ref"]["actor"]["optim"], 1e-3)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-9)
    check_changes(summary["checkpoint"], start, change)


def policy_loss(weights, config, trajectories, advantages) -> torch.Tensor:
    """On-policy PPO: the ratio is 1, so the loss is the mean of -A rho over all tokens."""
    log_prob, _ = oracle.log_probs(
        weights, config, [t["prompt"] + t["response"] for t in trajectories]
    )
    terms = []
    for i, t in enumerate(trajectories):
        own = log_prob[i][len(t["prompt"]) - 1 :][mask_of(t)]
        terms.append(-advantages[i] * (own - own.detach()).exp())
    return torch.cat(terms).mean()


def test_weights_of_a_correction_multiply_the_loss(tmp_path):
    """Per-token advantages and importance weights, both given, on a tree that is cut into blocks."""
    _, path = write_model("qwen2", tmp_path)
    trajectories, _ = random_batch(4, "two_levels")
    model = _C.Model.load(str(path), "fp64", with_backward=True)
    weights = wide(model)
    config = json.loads((path / "config.json").read_text())
    draw = torch.Generator().manual_seed(2)
    sizes = [int(mask_of(t).sum()) for t in trajectories]
    advantages = [torch.randn(n, generator=draw, dtype=torch.float64) for n in sizes]
    importance = [torch.rand(n, generator=draw, dtype=torch.float64) + 0.5 for n in sizes]
    text = config_json(
        actor_rollout_ref__actor__ppo_max_token_len_per_gpu=40,
        algorithm__rollout_correction__rollout_is="token",
    )
    result = _C.accumulate_gradients(model, text, trajectories, advantages, weights=importance)
    weighted = [a * w for a, w in zip(advantages, importance, strict=True)]
    loss = policy_loss(weights, config, trajectories, weighted)
    loss.backward()
    assert result["num_blocks"] > 1
    assert abs(result["loss"] - loss.item()) <= 1e-10
    check_grads(model, weights, 1e-10)


def test_a_number_and_a_tensor_of_it_are_one_advantage(tmp_path):
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(1, "two_levels")
    model = _C.Model.load(str(path), "fp64", with_backward=True)
    text = config_json()
    plain = _C.accumulate_gradients(model, text, trajectories, advantages)["loss"]
    spread = [
        torch.full((int(mask_of(t).sum()),), advantage, dtype=torch.float64)
        for t, advantage in zip(trajectories, advantages, strict=True)
    ]
    assert _C.accumulate_gradients(model, text, trajectories, spread)["loss"] == plain
    weights = wide(model)
    config = json.loads((path / "config.json").read_text())
    dense = dense_loss(
        weights, config, trajectories, advantages, None, None, json.loads(text)
    ).item()
    assert plain == pytest.approx(dense, rel=1e-10)


def test_a_reward_model_of_transformers_scores_at_the_last_token(tmp_path):
    from transformers import LlamaForSequenceClassification

    _, path = write_model("llama", tmp_path)
    torch.manual_seed(8)
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    wanted = LlamaForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    seen = []
    submit = Host.submit

    def watch(self, trajectory, validation):
        seen.append(trajectory)
        submit(self, trajectory, validation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "submit", watch)
        patch.setattr(Host, "reward_model_tokens", lambda *_: None, raising=False)
        run(
            path,
            tmp_path / "run",
            **{
                "reward.reward_model.enable": "true",
                "reward.reward_model.model_path": str(tmp_path / "rm"),
            },
        )
    assert len(seen) == 16
    for t in seen:
        with torch.no_grad():
            number = wanted(torch.tensor([t["prompt"] + t["response"]])).logits.item()
        assert t["reward_model_score"] == pytest.approx(number, abs=1e-5)
