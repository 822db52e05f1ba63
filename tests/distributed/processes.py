"""Runs over several processes on this machine: torchrun, Gloo on the loopback device, one thread a process."""

from __future__ import annotations

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
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **changes}


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
