"""Which process of a run this is, from the variables that launchers set: torchrun, MPI, Slurm's srun.

A run needs one meeting point: MASTER_ADDR and MASTER_PORT. torchrun sets both. Under srun the first node of the step
stands in, and a port by the job's number; under MPI on one machine this machine does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from banyan.errors import UserError

_PORT = 29500
# Launcher: rank, number of processes, rank on this machine, number of processes on this machine.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Of the step and not of the job: a batch script itself is one process.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Placement:
    """One process among those of a run."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int  # processes on this machine
    host: str  # where rank 0 is met
    port: int


def find(environ: Mapping[str, str]) -> Placement | None:
    """This process's place, or None where it is alone.

    Raises:
        UserError: a launcher's variable that makes no sense, or no meeting point.
    """
    for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
        if rank not in environ or size not in environ:
            continue
        world_size = _number(environ, size, 1)
        if world_size == 1:
            return None
        number = _number(environ, rank, 0)
        if number >= world_size:
            raise UserError(
                f"[parallel] {rank}: wanted less than {size} ({world_size}), got {number}"
            )
        here = _number(environ, local_size, 1) if local_size in environ else 1
        host, port = _meeting_point(environ, launcher, here == world_size)
        place = _number(environ, local_rank, 0) if local_rank in environ else 0
        return Placement(number, world_size, place, here, host, port)
    return None


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    # srun writes "4(x2)": four on each of two machines.
    found = re.match(r"\d+", environ[name])
    if not found or int(found[0]) < least:
        raise UserError(f"[parallel] {name}: wanted a number >= {least}, got {environ[name]!r}")
    return int(found[0])


def _meeting_point(environ: Mapping[str, str], launcher: str, one_machine: bool) -> tuple[str, int]:
    host = environ.get("MASTER_ADDR")
    if not host and launcher == "Slurm":
        host = _first_node(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""))
    if not host and one_machine:
        host = "127.0.0.1"
    if not host:
        raise UserError(
            f"[parallel] MASTER_ADDR: wanted the machine of rank 0 for a run of {launcher} over several, got none"
        )
    if "MASTER_PORT" in environ:
        return host, _number(environ, "MASTER_PORT", 1)
    return host, _PORT + int(environ.get("SLURM_JOB_ID", "0")) % 1000


def _first_node(nodes: str) -> str:
    """node[03-05,9],other -> node03"""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    return found[1] + (found[2] or "") if found else ""
