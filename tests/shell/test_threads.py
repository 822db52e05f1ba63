"""How many threads a process takes beside others of its launcher (core/threads.h)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_LAUNCHER = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "TORCHELASTIC_RUN_ID",
    "OMP_NUM_THREADS",
)


def default_threads(**env: str) -> int:
    kept = {k: v for k, v in os.environ.items() if k not in _LAUNCHER}
    code = "from banyan import _C; print(_C.default_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_one_process_takes_its_cores() -> None:
    alone = default_threads()
    assert 1 <= alone <= len(os.sched_getaffinity(0))
    assert default_threads(LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="none") == alone


@pytest.mark.parametrize("ranks", [2, 64])
def test_ranks_of_torchrun_share_them(ranks: int) -> None:
    env = {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    assert default_threads(**env) == max(1, default_threads() // ranks)


def test_what_the_user_asked_for_is_kept() -> None:
    assert default_threads(OMP_NUM_THREADS="5") == 5
    assert default_threads(LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1") == 1
