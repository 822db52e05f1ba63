"""Advantages, losses and corrections of the core against a restatement in plain PyTorch (restatement.py).

The batch is random: groups of unequal size, responses of unequal length with observation tokens in between, mask 0.
The core gets the masked tokens only, one list per response; the restatement gets padded tensors with masks.
Values and gradients agree to 1e-10 in fp64.
"""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import restatement as plain
import torch

from banyan import _C

SEEDS = (0, 1, 2, 3)


class Batch:
    """Padded tensors [S, T] and their masked tokens as lists."""

    GROUPS: ClassVar[list[int]] = [0, 0, 0, 0, 1, 1, 2, 3, 3, 3]  # group 2 is a group of one

    def __init__(self, seed: int):
        self.draw = torch.Generator().manual_seed(seed)
        size, width = len(self.GROUPS), 9
        self.m = torch.zeros(size, width, dtype=torch.float64)
        for i in range(size):
            length = int(torch.randint(1, width + 1, (1,), generator=self.draw))
            self.m[i, :length] = (torch.rand(length, generator=self.draw) < 0.7).double()
            self.m[i, int(torch.randint(0, length, (1,), generator=self.draw))] = 1
        order = torch.randperm(size, generator=self.draw)
        self.g = [self.GROUPS[i] for i in order]
        self.score = torch.randint(0, 3, (size,), generator=self.draw).double() / 2
        self.l_old = -self.random(0.02, 4.0)
        self.l = -torch.clamp(-self.l_old + self.normal(0.4), min=0.01)
        self.l_ref = -torch.clamp(-self.l_old + self.normal(0.4), min=0.01)
        self.l_roll = -torch.clamp(-self.l_old + self.normal(0.5), min=0.01)
        last = (self.m * torch.arange(1, width + 1)).max(1).indices
        self.r = torch.zeros_like(self.m)
        self.r[torch.arange(size), last] = self.score

    def random(self, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(
            self.m.shape, generator=self.draw, dtype=torch.float64
        )

    def normal(self, scale: float) -> torch.Tensor:
        return scale * torch.randn(self.m.shape, generator=self.draw, dtype=torch.float64)

    def rows(self, values: torch.Tensor) -> list[list[float]]:
        return [values[i][self.m[i] == 1].tolist() for i in range(len(self.g))]

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.m == 1]

    def offsets(self) -> list[int]:
        return [0, *self.m.sum(1).cumsum(0).long().tolist()]

    def positions(self) -> list[list[int]]:
        return [torch.nonzero(row)[:, 0].tolist() for row in self.m]


def close(got: list[list[float]], want: torch.Tensor, batch: Batch, tolerance: float = 1e-10):
    for row, wanted in zip(got, batch.rows(want), strict=True):
        assert row == pytest.approx(wanted, rel=tolerance, abs=tolerance)


ESTIMATORS = {
    "gae": plain.gae,
    "grpo": plain.grpo,
    "grpo_vectorized": plain.grpo,
    "grpo_passk": plain.grpo_passk,
    "gdpo": plain.gdpo,
    "reinforce_plus_plus": plain.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": plain.reinforce_plus_plus_baseline,
    "rloo": plain.rloo,
    "rloo_vectorized": plain.rloo,
    "opo": plain.opo,
    "remax": plain.remax,
    "gpg": plain.gpg,
    "optimal_token_baseline": plain.optimal_token_baseline,
    "tir_optimal_token_baseline": plain.tir_optimal_token_baseline,
}
SINGLES_LEFT_OUT = ("gdpo", "reinforce_plus_plus_baseline")  # of the whitening, T20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kl", [False, True], ids=["scores", "scores_with_kl"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages(name, kl, seed):
    batch = Batch(seed)
    r = batch.r - 0.1 * plain.kl_value("k3", batch.l_old, batch.l_ref) * batch.m if kl else batch.r
    value, q, w = batch.normal(1.0), batch.random(0.1, 0.9), batch.random(0.5, 2.0)
    greedy = torch.rand(len(batch.g), generator=batch.draw, dtype=torch.float64)
    components = [torch.randint(0, 3, (len(batch.g),), generator=batch.draw).double() for _ in "ab"]
    options = {
        "gamma": 0.97,
        "lam": 0.9,
        "norm_adv_by_std_in_grpo": seed % 2 == 0,
        "gdpo_reward_keys": ["a", "b"],
        "gdpo_reward_weights": [1.0, 0.5],
    }
    given = {
        "group": batch.g,
        "score": batch.score.tolist(),
        "token_reward": batch.rows(r),
        "value": batch.rows(value),
        "old_log_prob": batch.rows(batch.l_old),
        "sum_squares": batch.rows(q),
        "weight": batch.rows(w) if kl else None,
        "position": batch.positions(),
        "greedy_score": greedy.tolist(),
        "components": {"a": components[0].tolist(), "b": components[1].tolist()},
    }
    got = _C.advantages(name, given, options)
    m, keep = batch.m, torch.ones(len(batch.g), dtype=torch.bool)
    if name in SINGLES_LEFT_OUT:
        keep = torch.tensor([batch.g.count(group) > 1 for group in batch.g])
        m = m * keep[:, None]
    advantage, returns = ESTIMATORS[name](
        r=r,
        m=m,
        g=batch.g,
        value=value,
        gamma=0.97,
        lam=0.9,
        by_std=options["norm_adv_by_std_in_grpo"],
        components=components,
        component_weights=[1.0, 0.5],
        greedy=greedy,
        l_old=batch.l_old,
        q=q,
        w=w if kl else None,
    )
    close(got["advantage"], advantage, batch)
    close(got["returns"], returns, batch)


LOSSES = {
    "vanilla": plain.vanilla,
    "dppo_tv": plain.dppo_tv,
    "dppo_kl": plain.dppo_kl,
    "gspo": plain.gspo,
    "sapo": plain.sapo,
    "gpg": plain.gpg_loss,
    "kl_cov": plain.kl_cov,
    "geo_mean": plain.geo_mean,
    "dro": plain.dro,
    "cispo": plain.cispo,
}
FORCED = ("gspo", "sapo", "geo_mean")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
OPTIONS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.5,
    "dppo_ratio_cap": 1.4,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "kl_cov_ratio": 0.2,
    "ppo_kl_coef": 0.3,
    "dro_beta": 0.5,
    "sequence_norm": 7.0,
}


def loss_tokens(batch: Batch, advantage: torch.Tensor, **more: torch.Tensor) -> dict:
    return {
        "log_prob": batch.flat(batch.l),
        "old_log_prob": batch.flat(batch.l_old),
        "advantage": batch.flat(advantage),
        "mask": torch.ones(int(batch.m.sum()), dtype=torch.float64),
        "offsets": batch.offsets(),
        **{name: batch.flat(values) for name, values in more.items()},
    }


def check_loss(got: dict, want: torch.Tensor, log_prob: torch.Tensor, batch: Batch):
    want.backward()
    assert got["loss"] == pytest.approx(want.item(), rel=1e-10, abs=1e-12)
    gap = (got["grad_log_prob"] - batch.flat(log_prob.grad)).abs().max()
    assert gap <= 1e-10 * max(1.0, log_prob.grad.abs().max())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name, weighted, seed):
    batch = Batch(seed)
    mode = "seq-mean-token-mean" if name in FORCED else AGGREGATIONS[seed % len(AGGREGATIONS)]
    advantage = (
        batch.normal(1.0) if name not in ("geo_mean",) else batch.normal(1.0)[:, :1] * batch.m
    )
    w = batch.random(0.2, 2.0)
    more = {"weight": w} if weighted else {}
    got = _C.policy_loss(
        name, loss_tokens(batch, advantage, **more), {**OPTIONS, "loss_agg_mode": mode}
    )
    lp = batch.l.clone().requires_grad_(True)
    if name == "geo_mean":
        per_sequence = plain.geo_mean(
            lp, batch.l_old, advantage, batch.m, OPTIONS, w if weighted else None
        )
        want = per_sequence.sum() / (batch.m.sum(1) > 0).sum()  # T11
    else:
        per_token = LOSSES[name](lp, batch.l_old, advantage, batch.m, OPTIONS)
        want = plain.agg(per_token * w if weighted else per_token, batch.m, mode, 7.0)
    check_loss(got, want, lp, batch)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_with_entropy_and_kl(mode, seed):
    batch = Batch(seed)
    advantage, entropy = batch.normal(1.0), batch.random(0.0, 3.0)
    kinds = ("low_var_kl", "mse", "abs", "k1+", "k3+", "abs+")
    for kind in kinds:
        options = {
            **OPTIONS,
            "loss_agg_mode": mode,
            "entropy_coeff": 0.01,
            "use_kl_loss": True,
            "kl_loss_coef": 0.2,
            "kl_loss_type": kind,
        }
        tokens = loss_tokens(batch, advantage, entropy=entropy, ref_log_prob=batch.l_ref)
        got = _C.policy_loss("vanilla", tokens, options)
        lp, h = batch.l.clone().requires_grad_(True), entropy.clone().requires_grad_(True)
        want = (
            plain.agg(plain.vanilla(lp, batch.l_old, advantage, batch.m, OPTIONS), batch.m, mode, 7)
            - 0.01 * plain.agg(h, batch.m, mode, 7)
            + 0.2 * plain.agg(plain.kl_loss(kind, lp, batch.l_ref, batch.l_old), batch.m, mode, 7)
        )
        check_loss(got, want, lp, batch)
        assert (got["grad_entropy"] - batch.flat(h.grad)).abs().max() <= 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_drops_tokens_of_the_band_and_nothing_else(seed):
    """The choice is random: whatever it is, the rest must be the clipped surrogate."""
    batch = Batch(seed)
    advantage = batch.normal(1.0)
    options = {**OPTIONS, "clip_cov_ratio": 0.1, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0, "step": 3}
    got = _C.policy_loss("clip_cov", loss_tokens(batch, advantage), options)
    lp = batch.l.clone().requires_grad_(True)
    ratio = plain.safe_exp(lp - batch.l_old)
    loss = plain.surrogate(advantage, ratio, OPTIONS)
    (grad,) = torch.autograd.grad((loss * batch.m).sum() / batch.m.sum(), lp, retain_graph=True)
    cov = plain.covariance(lp, advantage, batch.m)
    clipped = loss > -advantage * ratio
    band = batch.flat((cov > 0.2) & (cov < 5.0) & ~clipped)
    dropped = (got["grad_log_prob"] - batch.flat(grad)).abs() > 1e-12
    count = min(max(1, int(0.1 * batch.m.sum().item())), int(band.sum()))
    assert dropped.sum() == count == got["clipped_tokens"]
    assert band[dropped].all()
    assert got["grad_log_prob"][dropped].abs().max() == 0
    want = (batch.flat(loss)[~dropped]).sum() / batch.m.sum()
    assert got["pg_loss"] == pytest.approx(want.item(), rel=1e-10)


def bounds(rule: str, threshold: str) -> tuple[float, float]:
    parts = [float(part) for part in threshold.split("_")]
    if not rule.endswith("k1"):
        return -math.inf, parts[0]
    low, high = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    return math.log(low), math.log(high)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", ["1.5", "0.6_1.8"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("rule", "rule_threshold"),
    [
        ("", ""),
        ("token_k1", "0.5_1.6"),
        ("token_k2", "0.15"),
        ("token_k3", "0.2"),
        ("seq_sum_k1", "2.5"),
        ("seq_mean_k2", "0.12"),
        ("seq_max_k3", "0.4"),
        ("seq_max_k2,token_k1", "0.6,1.9"),
    ],
)
def test_correction(rule, rule_threshold, normalise, threshold, level, seed):
    batch = Batch(seed)
    u = (batch.l_old - batch.l_roll) * batch.m
    got = _C.correction(
        batch.rows(batch.l_old),
        batch.rows(batch.l_roll),
        {
            "rollout_is": level,
            "rollout_is_threshold": threshold,
            "rollout_is_batch_normalize": normalise,
            "rollout_rs": rule,
            "rollout_rs_threshold": rule_threshold,
        },
    )
    keep = batch.m.clone()
    for one, limit in zip(rule.split(","), rule_threshold.split(","), strict=True):
        if one:
            keep = keep * plain.rejection(u, batch.m, one, *bounds(one, limit))
    parts = [float(part) for part in threshold.split("_")]
    low, high = parts if len(parts) == 2 else (0.0, parts[0])
    w = plain.weights(u, batch.m, keep, level, low, high, len(parts) == 2, normalise)
    close(got["weight"], w, batch)
    if rule:
        close([[float(k) for k in row] for row in got["keep"]], keep, batch)
        share = 1 - keep.sum() / batch.m.sum()
        assert got["metrics"]["rollout_rs_masked_fraction"] == pytest.approx(share.item())
    law = (batch.l_roll - batch.l_old) * batch.m
    assert got["metrics"]["kl"] == pytest.approx((law.sum() / batch.m.sum()).item(), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_value_loss(mode, seed):
    batch = Batch(seed)
    old, returns = batch.normal(1.0), batch.normal(1.0)
    value = (old + batch.normal(0.6)).requires_grad_(True)
    got = _C.value_loss(
        {
            "value": batch.flat(value).detach(),
            "old_value": batch.flat(old),
            "returns": batch.flat(returns),
            "mask": torch.ones(int(batch.m.sum()), dtype=torch.float64),
            "offsets": batch.offsets(),
        },
        {"cliprange_value": 0.4, "loss_agg_mode": mode, "sequence_norm": 7.0},
    )
    clipped = torch.minimum(torch.maximum(value, old - 0.4), old + 0.4)
    errors = torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)
    want = 0.5 * plain.agg(errors, batch.m, mode, 7.0)
    want.backward()
    assert got["loss"] == pytest.approx(want.item(), rel=1e-10)
    assert (got["grad_value"] - batch.flat(value.grad)).abs().max() <= 1e-12


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
@pytest.mark.parametrize("free", [False, True])
def test_preference_losses(free, kind, seed):
    batch = Batch(seed)
    smoothing = 0.1 if kind == "sigmoid" and seed % 2 else 0.0
    chosen, rejected = [0, 2, 4, 6, 8], [1, 3, 5, 7, 9]
    tokens = {
        "log_prob": batch.flat(batch.l),
        "offsets": batch.offsets(),
        "chosen": chosen,
        "rejected": rejected,
    }
    if not free:
        tokens["ref_log_prob"] = batch.flat(batch.l_ref)
    got = _C.preference_loss(
        tokens,
        {
            "loss_type": kind,
            "beta": 0.3,
            "label_smoothing": smoothing,
            "reference_free": free,
            "sft_coef": 0.2,
        },
    )
    lp = batch.l.clone().requires_grad_(True)
    n = batch.m.sum(1)
    score = (lp * batch.m).sum(1)
    reference = 0.0 if free else (batch.l_ref * batch.m).sum(1)
    h = score - reference
    h = h[chosen] - h[rejected]
    if kind == "ipo":
        terms = (h - 1 / 0.6) ** 2
    else:
        sigmoid = torch.nn.functional.logsigmoid
        terms = -(1 - smoothing) * sigmoid(0.3 * h) - smoothing * sigmoid(-0.3 * h)
    want = (terms - 0.2 * ((lp * batch.m).sum(1) / n)[chosen]).mean()
    want.backward()
    assert got["loss"] == pytest.approx(want.item(), rel=1e-10)
    assert (got["grad"] - batch.flat(lp.grad)).abs().max() <= 1e-12


def test_reward_model_loss():
    draw = torch.Generator().manual_seed(0)
    good, bad = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in "ab")
    got = _C.reward_model_loss(good, bad, 0.05)
    good, bad = good.requires_grad_(True), bad.requires_grad_(True)
    want = (-torch.nn.functional.logsigmoid(good - bad) + 0.05 * (good + bad) ** 2).mean()
    want.backward()
    assert got["loss"] == pytest.approx(want.item(), rel=1e-12)
    assert (got["grad_chosen"] - good.grad).abs().max() <= 1e-14
    assert (got["grad_rejected"] - bad.grad).abs().max() <= 1e-14


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3+"])
def test_kl_in_the_reward(name):
    batch = Batch(0)
    got = _C.reward_kl(
        batch.rows(batch.l_old), batch.rows(batch.l_ref), batch.rows(batch.r), name, 0.3
    )
    kl = plain.kl_value(name.removesuffix("+"), batch.l_old, batch.l_ref)
    close(got["token_reward"], batch.r - 0.3 * kl, batch)
    mean = ((kl * batch.m).sum(1) / batch.m.sum(1)).mean()
    assert got["kl"] == pytest.approx(mean.item(), rel=1e-12)
