"""Every policy loss through a model and a trie, cut at random budgets, against a dense batch in plain PyTorch.

The dense side pads the samples (oracle.py), takes the loss from the formulas (restatement.py) and lets autograd do the
rest. Loss and parameter gradients agree to 1e-10 in fp64 whatever the budget and the way of carrying across cuts.
"""

from __future__ import annotations

import json
import random

import oracle
import pytest
import restatement as plain
import torch
from models import write_model
from test_algorithms import FORCED, LOSSES
from test_gradients import config_json, random_batch

from banyan import _C

ACTOR = "actor_rollout_ref__actor__"
KEYS = {
    f"{ACTOR}clip_ratio_low": 0.2,
    f"{ACTOR}clip_ratio_high": 0.3,
    f"{ACTOR}clip_ratio_c": 1.5,
    f"{ACTOR}tau_pos": 1.0,
    f"{ACTOR}tau_neg": 1.05,
    f"{ACTOR}policy_loss__dppo_ratio_cap": 1.4,
    f"{ACTOR}policy_loss__kl_cov_ratio": 0.1,
    f"{ACTOR}policy_loss__ppo_kl_coef": 0.3,
    f"{ACTOR}policy_loss__clip_cov_ratio": 0.1,
    f"{ACTOR}policy_loss__clip_cov_lb": -5.0,
    f"{ACTOR}policy_loss__dro_beta": 0.5,
}
OPTIONS = {name.split("__")[-1]: value for name, value in KEYS.items()}


def own_tokens(values: list[torch.Tensor], trajectories: list[dict]) -> list[torch.Tensor]:
    """Of each sample's log-probabilities those of its masked response tokens."""
    return [
        value[len(t["prompt"]) - 1 :][torch.tensor(t["response_mask"], dtype=torch.bool)]
        for value, t in zip(values, trajectories, strict=True)
    ]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Case:
    """A tiny model, a random tree of trajectories, and old log-probabilities that differ from the new ones."""

    def __init__(self, seed: int, directory):
        _, path = write_model(("llama", "qwen3")[seed % 2], directory, seed)
        self.config = json.loads((path / "config.json").read_text())
        self.model = _C.Model.load(str(path), "fp64", with_backward=True)
        self.trajectories, self.advantages = random_batch(seed, "two_levels")
        self.samples = [t["prompt"] + t["response"] for t in self.trajectories]
        scored = _C.score(self.model, self.samples)["logprobs"]
        draw = torch.Generator().manual_seed(seed)
        self.old = [
            row + 0.3 * torch.randn(row.shape, generator=draw, dtype=row.dtype)
            for row in own_tokens(scored, self.trajectories)
        ]

    def trie(self, name: str, **keys) -> tuple[float, dict[str, torch.Tensor], int]:
        """Loss, gradients and number of blocks of the core."""
        mode = None if name in FORCED else "token-mean"
        own = {f"{ACTOR}policy_loss__loss_mode": name, f"{ACTOR}loss_agg_mode": mode}
        text = config_json(**{**KEYS, **own, **keys})
        result = _C.accumulate_gradients(
            self.model, text, self.trajectories, self.advantages, self.old
        )
        grads = {key: value.clone() for key, value in self.model.grads().items()}
        return result["loss"], grads, result["num_blocks"]

    def dense(self, name: str) -> tuple[float, dict[str, torch.Tensor]]:
        weights = {
            key: value.detach().double().clone().requires_grad_()
            for key, value in self.model.params().items()
        }
        scored = oracle.log_probs(weights, self.config, self.samples)[0]
        rows = own_tokens(scored, self.trajectories)
        mask = padded([torch.ones_like(row) for row in rows]).detach()
        new, old = padded(rows), padded(self.old)
        advantage = torch.tensor(self.advantages, dtype=new.dtype)[:, None] * mask
        loss = LOSSES[name](new, old, advantage, mask, OPTIONS)
        if name == "geo_mean":
            loss = loss.mean()
        else:
            mode = "seq-mean-token-mean" if name in FORCED else "token-mean"
            loss = plain.agg(loss, mask, mode, 1.0)
        loss.backward()
        return loss.item(), {key: value.grad for key, value in weights.items()}

    def random_cut(self, draw: random.Random) -> dict:
        longest = max(len(sample) for sample in self.samples)
        return {
            "actor_rollout_ref__sharing__max_tokens_per_block": draw.randint(longest, longest + 20),
            "actor_rollout_ref__sharing__carry": draw.choice(["retain", "recompute", "replay"]),
        }


def check_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str):
    for name, gradient in want.items():
        gap = (got[name].double() - gradient).norm()
        assert gap <= 1e-10 * gradient.norm() + 1e-12, f"{what}: {name}"


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> list[Case]:
    return [Case(seed, tmp_path_factory.mktemp(str(seed))) for seed in range(2)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_dense(name, seed, cases):
    case = cases[seed]
    loss, want = case.dense(name)
    draw = random.Random(f"{name} {seed}")
    for keys in ({}, case.random_cut(draw)):
        got, gradients, _ = case.trie(name, **keys)
        assert got == pytest.approx(loss, rel=1e-10, abs=1e-12), keys
        check_equal(gradients, want, str(keys))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_tokens_that_clip_cov_drops_do_not_depend_on_the_cut(seed, cases):
    case = cases[seed]
    loss, want, blocks = case.trie("clip_cov")
    surrogate, plain_gradients, _ = case.trie(
        "vanilla", **{f"{ACTOR}clip_ratio_c": 1e9}
    )  # what nothing dropped would give
    assert blocks == 1
    assert loss != pytest.approx(surrogate, rel=1e-6)
    assert any((want[key] - plain_gradients[key]).norm() > 0 for key in want)
    draw = random.Random(seed)
    for _ in range(3):
        keys = case.random_cut(draw)
        got, gradients, blocks = case.trie("clip_cov", **keys)
        assert blocks > 1
        assert got == pytest.approx(loss, rel=1e-10), keys
        check_equal(gradients, want, str(keys))
