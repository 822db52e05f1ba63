"""One whole training step against plain PyTorch: same trajectories, same AdamW, same weights after it."""

from __future__ import annotations

import json

import pytest
import torch
from banyan.config.resolve import resolve
from models import write_model
from test_gradients import dense_loss

from banyan import _C

VOCAB = 131


class Host:
    """Fixed prompts; the reward is a function of the tokens; keeps the trajectories it saw."""

    def __init__(self, prompts):
        self.prompts, self.pending, self.trajectories, self.metrics = prompts, [], [], []

    def next_prompts(self, count):
        return [{"row": row, "tokens": tokens} for row, tokens in enumerate(self.prompts[:count])]

    def validation_prompts(self):
        return []

    def submit(self, trajectory, validation):
        value = sum(token % 3 for token in trajectory["response"]) / len(trajectory["response"])
        score = {
            "row": trajectory["row"],
            "index": trajectory["index"],
            "value": value,
            "extra": {},
        }
        self.pending.append(score)

    def poll(self):
        scores, self.pending = self.pending, []
        return scores

    def on_samples(self, step, validation, trajectories, scores):
        self.trajectories, self.scores = trajectories, scores

    def validation_metrics(self, trajectories, scores):
        return {}

    def log(self, step, metrics):
        self.metrics.append(metrics)

    def say(self, line):
        pass

    def should_stop(self):
        return False

    def save_state(self):
        return ""

    def load_state(self, state):
        pass


def run(path, directory, dtype=None, **changes) -> tuple[Host, dict, dict]:
    overrides = {
        "data.train_files": "unused.jsonl",
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 4,
        "actor_rollout_ref.model.path": str(path),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.response_length": 12,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.02,
        "trainer.default_local_dir": str(directory),
        "trainer.total_training_steps": 1,
        **changes,
    }
    tree = resolve([f"{key}={value}" for key, value in overrides.items()]).tree
    tree["_shell"] = {"num_train_rows": 8, "stop_ids": [0], "model_dir": str(path)}
    if dtype is not None:  # float64 is no user's choice; the exact comparison needs it
        tree["actor_rollout_ref"]["rollout"]["dtype"] = dtype
    draw = torch.Generator().manual_seed(3)
    trunk = torch.randint(1, VOCAB, (20,), generator=draw).tolist()
    prompts = [trunk + torch.randint(1, VOCAB, (6 + i,), generator=draw).tolist() for i in range(4)]
    host = Host(prompts)
    summary = _C.train(json.dumps(tree), host)
    return host, tree, summary


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_weight_changes_of_one_step(name, tmp_path):
    _, path = write_model(name, tmp_path)
    host, tree, summary = run(path, tmp_path / "run", dtype="float64")
    by_row: dict[int, list[float]] = {}
    for score in host.scores:
        by_row.setdefault(score["row"], []).append(score["value"])
    advantages = []
    for score in host.scores:
        values = torch.tensor(by_row[score["row"]], dtype=torch.float64)
        advantages.append(((score["value"] - values.mean()) / (values.std() + 1e-6)).item())

    before = _C.Model.load(str(path), "fp64").params()
    weights = {key: value.double().clone().requires_grad_() for key, value in before.items()}
    config = json.loads((path / "config.json").read_text())
    loss = dense_loss(weights, config, host.trajectories, advantages, None, None, tree)
    loss.backward()
    optim = tree["actor_rollout_ref"]["actor"]["optim"]
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), optim["clip_grad"])
    optimizer = torch.optim.AdamW(
        weights.values(), lr=1e-3, betas=tuple(optim["betas"]), weight_decay=optim["weight_decay"]
    )
    optimizer.step()
    assert host.metrics[-1]["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)

    from safetensors.torch import load_file

    after = load_file(f"{summary['checkpoint']}/state/master.safetensors")
    for key, weight in weights.items():
        want = (weight - before[key]).detach()
        got = after[key] - before[key]
        assert want.norm() > 0, key
        assert (got - want).norm() <= 1e-3 * want.norm(), key


def test_a_step_with_plain_torch_operators_everywhere(tmp_path):
    """banyan.kernels=aten runs the whole step in bf16 and lands where the native kernels land."""
    _, path = write_model("llama", tmp_path)
    metrics = []
    for kernels in ("native", "aten"):
        host, _, _ = run(
            path,
            tmp_path / kernels,
            **{"banyan.kernels": kernels, "actor_rollout_ref.rollout.dtype": "bfloat16"},
        )
        metrics.append(host.metrics[-1])
    native, aten = metrics
    assert aten["actor/grad_norm"] == pytest.approx(native["actor/grad_norm"], rel=0.5)
    assert aten["actor/entropy"] == pytest.approx(native["actor/entropy"], rel=0.05)
    assert aten["training/rollout_probs_diff_max"] < 0.05
    assert native["training/rollout_probs_diff_max"] == 0.0
