"""Which process of a run this is, and how ranks that disagree or fail are named."""

from __future__ import annotations

import json

import pytest
from banyan.errors import RunError, UserError
from banyan.launch import environment, session
from banyan.launch.environment import Placement

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "4000",
}


def test_one_process_has_no_place():
    assert environment.find({}) is None
    assert environment.find({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    # A batch script of a job of four tasks is one process; only srun starts a step of four.
    assert environment.find({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_each_launcher_says_where_a_process_stands():
    assert environment.find(TORCHRUN) == Placement(3, 4, 1, 2, "node7", 4000)
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[03-04],other",
        "SLURM_JOB_ID": "7123",
    }
    assert environment.find(slurm) == Placement(5, 8, 1, 4, "gpu03", 29623)
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert environment.find(mpi) == Placement(1, 2, 1, 2, "127.0.0.1", 29500)
    # torchrun inside a step of Slurm: torchrun's word counts.
    assert environment.find({**slurm, **TORCHRUN}).rank == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "[parallel] RANK: wanted less than WORLD_SIZE (4), got 4"),
        ({"WORLD_SIZE": "all"}, "[parallel] WORLD_SIZE: wanted a number >= 1, got 'all'"),
        (
            {"MASTER_ADDR": ""},
            "[parallel] MASTER_ADDR: wanted the machine of rank 0 for a run of torchrun over several, got none",
        ),
    ],
)
def test_variables_that_make_no_sense_are_named(changes, message):
    with pytest.raises(UserError) as error:
        environment.find({**TORCHRUN, **changes})
    assert str(error.value) == message


class Store:
    """A store of torch.distributed as a dictionary."""

    def __init__(self, **values: str) -> None:
        self.values = {key.replace("__", "/"): value.encode() for key, value in values.items()}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: object) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")


def place(rank: int) -> Placement:
    return Placement(rank, 2, rank, 2, "127.0.0.1", 29500)


def test_the_first_key_that_differs_is_named():
    one = json.dumps({"data": {"seed": 1, "files": ["a"]}, "trainer": {"device": "cpu"}})
    other = json.dumps({"data": {"seed": 1, "files": ["b"]}, "trainer": {"device": "cpu"}})
    store = Store()
    with pytest.raises(UserError, match="waited 120 s for the configuration of rank 1 in vain"):
        session._compare(store, place(0), one)
    session._compare(store, place(1), one)
    with pytest.raises(UserError) as error:
        session._compare(store, place(1), other)
    assert str(error.value) == (
        "[parallel] data.files: wanted one value on all ranks, got ['a'] on rank 0 and ['b'] on rank 1"
    )


def test_a_broken_collective_tells_the_reason_of_the_rank_that_failed(monkeypatch):
    monkeypatch.setattr(session, "_LAST_WORDS_S", 0.2)
    broken = RuntimeError(
        "[parallel] all_gather of [1] Long in group dp: rank 0 waited for rank 1 in vain: reset"
    )
    store = Store()
    error = session._last_words(store, place(0), broken)
    assert isinstance(error, RunError)
    assert str(error).endswith("in vain: reset; rank 1 is gone or hangs: it left no reason")
    reason = OSError("model.safetensors: the disk is full")
    assert session._last_words(store, place(1), reason) is reason
    error = session._last_words(store, place(0), broken)
    assert str(error).endswith("; rank 1 failed: model.safetensors: the disk is full")
