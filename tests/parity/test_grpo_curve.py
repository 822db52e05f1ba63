"""20 GRPO steps of SmolLM2 in fp32 against plain PyTorch over transformers on the same rollouts.

banyan runs and its trajectories are kept; PyTorch then makes the same updates from them: advantages of the groups,
log-probabilities before the step and of the reference, two mini-batches a step, clipped loss and KL loss.
With BANYAN_KEEP_FIGURES=1 the curves are kept in tests/parity/figures.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import curves
import pytest
import torch
from conftest import needs_smollm2

STEPS, PROMPTS, GROUP = 20, 2, 4
KEYS = {
    "data.train_files": "unused.jsonl",
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": PROMPTS,
    "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS // 2,
    "actor_rollout_ref.actor.optim.lr": 1e-5,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.05,
    "actor_rollout_ref.rollout.n": GROUP,
    "actor_rollout_ref.rollout.response_length": 8,
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.05,
    "trainer.total_training_steps": STEPS,
    "trainer.val_before_train": False,
}


class Host:
    """Fixed prompts; rewards shorter digits-only text by a rule on tokens; keeps what each step sampled."""

    def __init__(self, prompts: list[list[int]]):
        self.prompts, self.next, self.pending = prompts, 0, []
        self.steps, self.metrics = [], []

    def next_prompts(self, count):
        rows = [(self.next + i) % len(self.prompts) for i in range(count)]
        self.next += count
        return [{"row": row, "tokens": self.prompts[row]} for row in rows]

    def validation_prompts(self):
        return []

    def submit(self, trajectory, validation):
        response = trajectory["response"]
        value = sum(token % 5 == 0 for token in response) / len(response)
        key = {"row": trajectory["row"], "index": trajectory["index"]}
        self.pending.append({**key, "value": value, "extra": {}})

    def poll(self):
        scores, self.pending = self.pending, []
        return scores

    def on_samples(self, step, validation, trajectories, scores):
        self.steps.append((copy.deepcopy(trajectories), copy.deepcopy(scores)))

    def validation_metrics(self, trajectories, scores):
        return {}

    def log(self, step, metrics):
        self.metrics.append(metrics)

    def say(self, line):
        pass

    def should_stop(self):
        return False

    def save_state(self):
        return "{}"

    def load_state(self, state):
        pass


def prompts(model: Path) -> list[list[int]]:
    from banyan.data import arithmetic
    from banyan.data.chat import Chat

    chat = Chat(model)
    rows = arithmetic.generate(2 * PROMPTS, 5)
    return [chat.encode(f"Q: {row['extra_info']['question']}\nA:") for row in rows]


def banyan_curve(model: Path, directory: str) -> tuple[list[tuple[float, float]], Host, dict]:
    from banyan.config.resolve import resolve

    from banyan import _C

    keys = {
        **KEYS,
        "actor_rollout_ref.model.path": model,
        "trainer.default_local_dir": directory,
    }
    tree = resolve([f"{key}={value}" for key, value in keys.items()]).tree
    tree["_shell"] = {"num_train_rows": 2 * PROMPTS, "stop_ids": [2], "model_dir": str(model)}
    host = Host(prompts(model))
    _C.train(json.dumps(tree), host)
    curve = [(step["actor/loss"], step["actor/grad_norm"]) for step in host.metrics]
    return curve, host, tree["actor_rollout_ref"]["actor"]


def advantages(trajectories: list[dict], scores: list[dict]) -> list[float]:
    """(r - mean) / (standard deviation + 1e-6) inside each prompt's group; 0 where all rewards are equal."""
    value = {(score["row"], score["index"]): score["value"] for score in scores}
    out = []
    for item in trajectories:
        group = torch.tensor(
            [v for (row, _), v in value.items() if row == item["row"]], dtype=torch.float64
        )
        own = value[item["row"], item["index"]]
        spread = group.std().item()
        out.append((own - group.mean().item()) / (spread + 1e-6) if spread > 0 else 0.0)
    return out


def response_log_probs(net, trajectories: list[dict]) -> list[torch.Tensor]:
    found = curves.token_log_probs(
        net, [item["prompt"] + item["response"] for item in trajectories]
    )
    return [f[len(item["prompt"]) - 1 :] for f, item in zip(found, trajectories, strict=True)]


def loss_of(new, old, ref, advantage: list[float], actor: dict) -> torch.Tensor:
    """Clipped loss with dual clip plus the KL loss (k3), means over tokens."""
    terms = []
    for n, o, r, a in zip(new, old, ref, advantage, strict=True):
        ratio = (n - o).clamp(-20, 20).exp()
        low, high = 1 - actor["clip_ratio"], 1 + actor["clip_ratio"]
        policy = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
        if a < 0:
            policy = torch.minimum(policy, torch.full_like(policy, -a * actor["clip_ratio_c"]))
        difference = (r - n).clamp(-20, 20)
        kl = (difference.exp() - difference - 1).clamp(-10, 10)  # verl's bounds
        terms.append(policy + actor["kl_loss_coef"] * kl)
    return torch.cat(terms).mean()


def torch_curve(model: Path, steps: list, actor: dict) -> list[tuple[float, float]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32).eval()
    reference = copy.deepcopy(net)
    optimizer = curves.adamw(net, actor["optim"])
    size = GROUP * PROMPTS // 2
    out = []
    for trajectories, scores in steps:
        advantage = advantages(trajectories, scores)
        with torch.no_grad():
            old = response_log_probs(net, trajectories)
            ref = response_log_probs(reference, trajectories)
        parts = []
        for begin in range(0, len(trajectories), size):
            part = slice(begin, begin + size)
            new = response_log_probs(net, trajectories[part])
            loss = loss_of(new, old[part], ref[part], advantage[part], actor)
            norm = curves.descend(net, optimizer, loss, actor["optim"]["clip_grad"])
            parts.append((loss.item(), norm))
        out.append(tuple(sum(column) / len(parts) for column in zip(*parts, strict=True)))
    return out


def figures(model: Path) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        ours, host, actor = banyan_curve(model, directory)
    theirs = torch_curve(model, host.steps, actor)
    tokens = sum(step["trie/logical_tokens"] for step in host.metrics)
    unique = sum(step["trie/unique_tokens"] for step in host.metrics)
    return curves.compare(
        ours,
        theirs,
        model="SmolLM2-135M-Instruct",
        dtype="float32",
        keys={key: value for key, value in KEYS.items() if not key.startswith(("trainer", "data"))},
        logical_tokens=tokens,
        unique_tokens=unique,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_smollm2
def test_20_grpo_steps_follow_plain_pytorch(smollm2):
    curves.check("grpo_curve", figures(smollm2))
