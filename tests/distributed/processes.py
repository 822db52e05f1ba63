"""Runs over several processes on this machine: torchrun, Gloo on the loopback device, one thread a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "shell"))  # its makers of models and rows


def environment(**changes: str) -> dict[str, str]:
    """Without what a launcher of the tests themselves may have set."""
    ours = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC", "SLURM_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    fixed = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # A frozen process does not hear torchrun ask it to end, which waits 30 seconds otherwise.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",
    }
    return {**kept, **fixed, **changes}


def torchrun(num_processes: int, *arguments: str) -> list[str]:
    """The command; --standalone takes a free port, and nobody has to resolve the machine's name."""
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    return [*start, f"--nproc-per-node={num_processes}", *arguments]


def run(command: list[str], timeout: float = 120, **changes: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def check_cases(
    size: int, worker: str, *arguments: str, num_cases: int, changes: float = 1e-8
) -> None:
    """Each case of a worker over `size` processes is as near one process as its dtype allows (`changes` in fp64)."""
    done = run(torchrun(size, str(HERE / worker), *arguments))
    assert done.returncode == 0, done.stdout
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == num_cases, done.stdout
    for case in cases:
        bound = 1e-10 if case["case"].startswith("fp64") else 1e-5
        assert case["loss"] < bound, case
        assert case["gradients"] < bound, case
        assert case["changes"] < (changes if bound == 1e-10 else 1e-3), case


REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(ord(letter) % 2 for letter in solution_str) / max(1, len(solution_str))
"""


def small_run(folder: Path, model: Path, **changes: str) -> list[str]:
    """Arguments of a run in fp32 whose reward varies with the response; `changes` by the last part of a key."""
    (folder / "reward.py").write_text(REWARD)
    keys = {
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": "'arithmetic:train?rows=40&seed=1'",
        "data.train_batch_size": "4",
        "data.max_prompt_length": "640",
        "data.max_response_length": "6",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
        "actor_rollout_ref.actor.optim.lr": "1e-3",
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.rollout.n": "4",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.02",
        "actor_rollout_ref.sharing.mode": "on",
        "reward.num_workers": "1",
        "reward.custom_reward_function.path": str(folder / "reward.py"),
        "trainer.total_training_steps": "3",
        "trainer.logger": "[console]",
    }
    for name, value in changes.items():
        keys[next(key for key in keys if key.rpartition(".")[2] == name)] = value
    return [f"{key}={value}" for key, value in keys.items()]
