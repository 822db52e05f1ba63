"""The processes of a run on a Ray cluster: one bundle of a placement group each, and in it the command that torchrun
would start there, with torchrun's variables.

The processes talk to each other through torch.distributed and not through Ray, which only places them, carries the
first one's output here and ends the others when one has failed. Every machine of the cluster needs the same banyan,
and the same paths to model and data.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from banyan.errors import RunError, UserError

# What Ray calls one device, and the variable that says which of a machine's devices a process sees.
_DEVICES = {
    "cuda": ("GPU", "CUDA_VISIBLE_DEVICES"),
    "npu": ("NPU", "ASCEND_RT_VISIBLE_DEVICES"),
}
_POLL_S = 0.2
_PLACE_S = 120.0  # for the placement group and the workers in it
_ANSWER_S = 30.0  # for a worker to say how its process fares
_END_S = 10.0  # for a process to end when it is asked to
_LAST_LINES = 40  # of a process that failed


@dataclass
class Seat:
    """Where a worker of the placement group found itself."""

    node: str
    address: str
    port: int  # free there
    devices: list[str] = field(default_factory=list)  # that Ray gave to it


def environments(seats: Sequence[Seat], device: str) -> list[dict[str, str]]:
    """Torchrun's variables per seat: ranks follow the seats, those of one machine next to each other.

    Ray shows a worker its own device alone, while a rank picks its device by its place on the machine: so all ranks of
    a machine see the devices of all of them.
    """
    nodes: dict[str, list[int]] = {}
    for number, seat in enumerate(seats):
        nodes.setdefault(seat.node, []).append(number)
    in_order = [number for members in nodes.values() for number in members]
    first = seats[in_order[0]]
    found: list[dict[str, str]] = [{} for _ in seats]
    for rank, number in enumerate(in_order):
        here = nodes[seats[number].node]
        found[number] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(seats)),
            "LOCAL_RANK": str(here.index(number)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
        }
        if device in _DEVICES:
            visible = [each for member in here for each in seats[member].devices]
            found[number][_DEVICES[device][1]] = ",".join(visible)
    return found


class Worker:
    """One process of the run, where Ray has placed it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque()
        self._reader: threading.Thread | None = None

    def seat(self) -> Seat:
        import socket

        import ray

        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        devices = []
        if self._device in _DEVICES:
            devices = context.get_accelerator_ids()[_DEVICES[self._device][0]]
        return Seat(context.get_node_id(), ray.util.get_node_ip_address(), port, devices)

    def start(self, command: list[str], environment: dict[str, str], folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "banyan.cli.main", *command],
            env={**os.environ, **environment},
            cwd=folder if os.path.isdir(folder) else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    def poll(self) -> tuple[list[str], int | None]:
        """Its lines since the last call, and its exit code once it has ended."""
        assert self._process is not None
        assert self._reader is not None
        code = self._process.poll()
        if code is not None:
            self._reader.join(_END_S)
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines, code

    def end(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def run(
    address: str,
    command: list[str],
    num_ranks: int,
    cpus_per_rank: int,
    device: str,
    say: Callable[[str], None],
) -> int:
    """Runs the command as `num_ranks` processes of a cluster; the exit code of the first that failed, or 0.

    Args:
        address: of a running cluster ("auto", "host:port", "ray://..."), or "local" for one of this machine alone,
            which ends with the run.
        device: "cpu", "cuda" or "npu": what one rank is given beside its processors.
        say: takes the lines of rank 0.

    Raises:
        UserError: Ray is missing, the cluster cannot be reached, or it has no room for so many ranks.
        RunError: a machine or a worker is gone.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "[launch] --ray: wanted the package ray, which is not installed; "
            "python3 -m pip install 'banyan-rl[ray]'"
        ) from error
    bundle = {"CPU": float(cpus_per_rank)}
    if device in _DEVICES:
        bundle[_DEVICES[device][0]] = 1.0
    _connect(ray, address, num_ranks * cpus_per_rank)
    try:
        return _run_in(ray, _reserve(ray, bundle, num_ranks), bundle, command, device, say)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str, num_cpus: int) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        if address == "local":
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise UserError(f"[launch] --ray {address}: cannot reach the cluster: {error}") from error


def _reserve(ray: Any, bundle: dict[str, float], num_ranks: int) -> Any:
    group = ray.util.placement_group([bundle] * num_ranks, strategy="PACK")
    if group.wait(_PLACE_S):
        return group
    free = ray.available_resources()
    room = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in bundle)
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    raise UserError(
        f"[launch] --ranks: wanted room for {num_ranks} times {wanted} within {_PLACE_S:.0f} s, got {room} free"
    )


def _run_in(
    ray: Any,
    group: Any,
    bundle: dict[str, float],
    command: list[str],
    device: str,
    say: Callable[[str], None],
) -> int:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0.0),
        "resources": {name: amount for name, amount in bundle.items() if name == "NPU"},
    }
    workers = [
        ray.remote(Worker)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
            **options,
        )
        .remote(device)
        for number in range(group.bundle_count)
    ]
    seats = ray.get([worker.seat.remote() for worker in workers], timeout=_PLACE_S)
    given = environments(seats, device)
    by_rank = sorted(range(len(workers)), key=lambda number: int(given[number]["RANK"]))
    ranks = [workers[number] for number in by_rank]
    where = [seats[number].address for number in by_rank]
    try:
        starts = [
            workers[number].start.remote(command, given[number], os.getcwd())
            for number in range(len(workers))
        ]
        ray.get(starts, timeout=_PLACE_S)
        return _watch(ray, ranks, where, say)
    finally:
        ends = [worker.end.remote() for worker in workers]
        with suppress(Exception):  # a worker that is gone has ended
            ray.wait(ends, num_returns=len(ends), timeout=2 * _END_S)


def _watch(ray: Any, ranks: list[Any], where: list[str], say: Callable[[str], None]) -> int:
    """Until all have ended well or one has not."""
    last: list[deque[str]] = [deque(maxlen=_LAST_LINES) for _ in ranks]
    codes: list[int | None] = [None] * len(ranks)
    while any(code is None for code in codes):
        for rank, worker in enumerate(ranks):
            if codes[rank] is not None:
                continue
            try:
                lines, codes[rank] = ray.get(worker.poll.remote(), timeout=_ANSWER_S)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                raise RunError(
                    f"[launch] rank {rank} on {where[rank]} is gone: {reason}"
                ) from error
            last[rank].extend(lines)
            if rank == 0:
                for line in lines:
                    say(line.rstrip("\n"))
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            for rank in failed:
                if rank != 0:
                    for line in last[rank]:
                        say(f"rank {rank} on {where[rank]}: {line.rstrip()}")
            return codes[failed[0]] or 1
        time.sleep(_POLL_S)
    return 0
