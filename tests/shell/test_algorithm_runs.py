"""Whole runs of the command with other algorithms than GRPO, on a tiny random model."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time

import pytest
from banyan.cli.main import main
from banyan.log.jsonl import by_step, read
from shell_files import write_tiny_llama

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def argv(tmp_path, tiny):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    share = sum(map(ord, solution_str)) % 7 / 7\n"
        "    return {'score': share, 'sum': share, 'short': 1.0 / (1 + len(solution_str))}\n"
    )
    return [
        "train",
        f"actor_rollout_ref.model.path={tiny}",
        "data.train_files='arithmetic:train?rows=40&seed=1'",
        "data.train_batch_size=4",
        "data.max_prompt_length=640",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=2",
        "trainer.logger=[console]",
    ]


def steps_of(directory) -> dict:
    return by_step(read(directory / "metrics.jsonl"))


def last_step(argv, directory, *changes) -> dict:
    assert main([*argv, f"trainer.default_local_dir={directory}", *changes]) == 0
    steps = steps_of(directory)
    return steps[max(steps)]


def test_ppo_with_a_critic_is_the_default(tmp_path, argv):
    from transformers import AutoModelForTokenClassification

    metrics = last_step(argv, tmp_path / "run", "trainer.critic_warmup=2")
    assert metrics["critic/vf_loss"] > 0
    assert metrics["critic/grad_norm"] > 0
    assert metrics["actor/grad_norm"] > 0
    assert "actor/grad_norm" not in steps_of(tmp_path / "run")[1]
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "run/global_step_2/critic")
    assert critic.config.num_labels == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["algorithm.adv_estimator=rloo"], "actor/grad_norm"),
        (
            [
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
                "actor_rollout_ref.actor.clip_ratio_low=0.0003",
                "actor_rollout_ref.actor.clip_ratio_high=0.0004",
                "actor_rollout_ref.actor.ppo_epochs=2",
            ],
            "actor/pg_clipfrac",
        ),
        (
            [
                "algorithm.adv_estimator=reinforce_plus_plus",
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.target_kl=0.001",
                "algorithm.kl_ctrl.horizon=100",
            ],
            "actor/reward_kl_penalty",
        ),
        (
            [
                "algorithm.adv_estimator=grpo",
                "algorithm.filter_groups.enable=true",
                "algorithm.filter_groups.metric=sum",
            ],
            "training/filter_groups/num_gen_batches",
        ),
        (["algorithm.adv_estimator=remax"], "critic/greedy_score/mean"),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[sum,short]",
                "algorithm.gdpo_reward_weights=[1.0,0.5]",
                "reward.reward_manager.name=gdpo",
            ],
            "reward/short/mean",
        ),
        (
            [
                "algorithm.adv_estimator=optimal_token_baseline",
                "algorithm.rollout_correction.rollout_is=token",
                "actor_rollout_ref.rollout.top_p=0.9",
            ],
            "rollout_corr/rollout_is_mean",
        ),
    ],
)
def test_algorithms_run(tmp_path, argv, changes, expected):
    metrics = last_step(argv, tmp_path / "run", *changes)
    assert expected in metrics
    assert metrics["actor/grad_norm"] > 0
    assert metrics["training/rollout_probs_diff_max"] == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["algorithm.adv_estimator=gdpo"], "gdpo_reward_keys"),
        (
            [
                "algorithm.adv_estimator=grpo",
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=null",
            ],
            "rollout_is_threshold",
        ),
        (
            [
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
                "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            ],
            "loss_agg_mode",
        ),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=dro"], "dro_beta"),
        (["critic.enable=false"], "critic.enable"),
        (["algorithm.adv_estimator=grpo", "trainer.critic_warmup=3"], "critic_warmup"),
    ],
)
def test_what_cannot_work_is_the_users_mistake(tmp_path, argv, capsys, changes, text):
    assert main([*argv, f"trainer.default_local_dir={tmp_path / 'run'}", *changes]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_killed_run_with_a_critic_resumes_to_the_same_bits(tmp_path, argv):
    argv = [*argv, "trainer.save_freq=1", "trainer.total_training_steps=5", "--share", "on"]
    argv += ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    last_step(argv, straight)
    command = [
        sys.executable,
        "-m",
        "banyan.cli.main",
        *argv,
        f"trainer.default_local_dir={killed}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 120
        while not (killed / "global_step_2").exists():
            assert time.monotonic() < deadline, "no checkpoint appeared"
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
    last_step(argv, killed)
    for file in ("", "critic/"):
        for name in ("model.safetensors", "state/master.safetensors", "state/moments.safetensors"):
            path = f"global_step_5/{file}{name}"
            assert (killed / path).read_bytes() == (straight / path).read_bytes(), path
