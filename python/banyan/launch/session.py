"""A run over several processes: they meet, compare their configurations, create the process groups, and end together.

The processes meet at a store of torch.distributed. Before any group is made, each puts its configuration there; the
first key on which two ranks differ is refused by name. When a rank fails it leaves its reason in the store, so that
the others, whose next collective breaks, can say who failed and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from banyan.errors import RunError, UserError, core_text
from banyan.launch import environment

_MEET_S = 120.0  # for all processes to start and to load their data
_LAST_WORDS_S = 5.0  # for the reasons of others once a rank has failed
_MARK = "[parallel] "  # what begins the message of a broken collective (parallel::RankError)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world_size: int = 1
    core: dict[str, Any] | None = None  # what banyan._C.train takes; None for one process
    local_size: int = 1  # processes on this machine
    deadline_s: float = 600.0

    def arranged(self, core: Any, **mesh: int) -> Ranks:
        """The same processes in the groups of another mesh (tp=2, ...); all of them call this together."""
        from torch import distributed

        if self.world_size == 1:
            return self
        names = []
        for members in core.mesh_groups(self.world_size, **mesh):
            whole = len(members) == self.world_size
            timeout = timedelta(seconds=self.deadline_s)
            group = distributed.group.WORLD if whole else distributed.new_group(members, timeout)
            names.append(group.group_name if self.rank in members else "")
        handed = {
            "rank": self.rank,
            "world_size": self.world_size,
            "mesh": mesh,
            "groups": names,
            "deadline_s": self.deadline_s,
        }
        return replace(self, core=handed)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def join(
    core: Any,
    configuration: str,
    device: str,
    deadline_s: float = 600.0,
    tokens: Iterable[Any] = (),
    mesh: dict[str, int] | None = None,
) -> Iterator[Ranks]:
    """The processes that the launcher started, until the block ends; one process pays nothing.

    Args:
        core: banyan._C.
        configuration: JSON of all that must be equal on all ranks.
        deadline_s: Seconds that one collective may take.
        tokens: Token ids of the training rows, which must be equal too.
        mesh: Sizes of the axes along which the processes work together; none: all share the samples.

    Raises:
        UserError: ranks whose configurations differ, before the first collective.
        RunError: another rank is gone, late or failed, with its reason where it left one.
    """
    place = environment.find(os.environ)
    if place is None:
        yield Ranks()
        return
    store = _meet(place)
    # A launcher ends the others as soon as one has failed; first they say what they know of it.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        _compare(store, place, _all_that_must_agree(core, configuration, tokens))
        _connect(store, place, device, deadline_s)
        ranks = Ranks(place.rank, place.world_size, None, place.local_size, deadline_s)
        yield ranks.arranged(core, **(mesh or {}))
    except BaseException as error:
        told = _last_words(store, place, error)
        if told is error:
            raise
        raise told from error
    signal.signal(signal.SIGTERM, before)
    _leave()


def _meet(place: environment.Placement) -> Any:
    from torch import distributed

    os.environ.setdefault("MASTER_ADDR", place.host)
    os.environ.setdefault("MASTER_PORT", str(place.port))
    if place.local_size == place.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store, _, _ = next(
            distributed.rendezvous(
                "env://", place.rank, place.world_size, timeout=timedelta(seconds=_MEET_S)
            )
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"[parallel] rank {place.rank} of {place.world_size} waited {_MEET_S:.0f} s at "
            f"{place.host}:{place.port} for the others in vain: {core_text(error)}"
        ) from error
    # torchrun's store outlives a restart, and with it what the ranks before have put there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"banyan/{attempt}", store)


def _all_that_must_agree(core: Any, configuration: str, tokens: Iterable[Any]) -> str:
    """The configuration, the data, and what computes: kernels of two kinds round differently."""
    digest = hashlib.sha256()
    for row in tokens:
        digest.update(array("i", row).tobytes() + b"|")
    tree = json.loads(configuration)
    tree["_process"] = {
        "training_rows": digest.hexdigest()[:16],
        "torch": core.torch_version,
        "gemm_kernel": core.capabilities()["gemm_kernel"],
    }
    return json.dumps(tree)


def _compare(store: Any, place: environment.Placement, configuration: str) -> None:
    """Raises UserError naming the first key on which a rank differs from rank 0."""
    digest = hashlib.sha256(configuration.encode()).hexdigest()
    store.set(f"configuration/{place.rank}", configuration)
    store.set(f"digest/{place.rank}", digest)
    digests = {}
    for rank in range(place.world_size):
        key = f"digest/{rank}"
        try:
            store.wait([key], timedelta(seconds=_MEET_S))
        except RuntimeError as error:
            raise UserError(
                f"[parallel] rank {place.rank} waited {_MEET_S:.0f} s for the configuration of rank {rank} in vain"
            ) from error
        digests[rank] = store.get(key)
    first = digests.pop(0)
    others = [rank for rank, found in digests.items() if found != first]
    if not others:
        return
    wanted = dict(_leaves(json.loads(store.get("configuration/0")), ""))
    got = dict(_leaves(json.loads(store.get(f"configuration/{others[0]}")), ""))
    name = next(key for key in {**wanted, **got} if wanted.get(key) != got.get(key))
    raise UserError(
        f"[parallel] {name}: wanted one value on all ranks, got {wanted.get(name)!r} on rank 0 and "
        f"{got.get(name)!r} on rank {others[0]}"
    )


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield name, node
        return
    for key, value in node.items():
        yield from _leaves(value, f"{name}.{key}" if name else key)


def _connect(store: Any, place: environment.Placement, device: str, deadline_s: float) -> None:
    """The process group of all, in which those of the mesh are created."""
    import torch
    from torch import distributed

    if device != "cpu":
        getattr(torch, device).set_device(place.local_rank)
    distributed.init_process_group(
        _BACKENDS[device],
        store=distributed.PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=deadline_s),
    )


def _leave() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _last_words(store: Any, place: environment.Placement, error: BaseException) -> BaseException:
    """What to raise in place of `error`: with who failed first, if that was another rank."""
    text = core_text(error)
    is_first = _MARK not in text or isinstance(error, UserError)
    _tell(store, f"failed/{place.rank}", text if is_first else "")
    told = error if is_first else RunError(f"{text}{_of_others(store, place)}")
    _record(told)
    return told


def _tell(store: Any, key: str, text: str) -> None:
    with suppress(RuntimeError):  # the store may have gone with the rank that held it
        store.set(key, text)


def _of_others(store: Any, place: environment.Placement) -> str:
    others = [rank for rank in range(place.world_size) if rank != place.rank]
    words: dict[int, str] = {}
    until = time.monotonic() + _LAST_WORDS_S
    try:
        while len(words) < len(others) and time.monotonic() < until:
            for rank in others:
                if rank not in words and store.check([f"failed/{rank}"]):
                    words[rank] = store.get(f"failed/{rank}").decode()
            time.sleep(0.05)
    except RuntimeError:
        return "; the store is gone too, and with it the rank that held it"
    told = [f"; rank {rank} failed: {words[rank]}" for rank in others if words.get(rank)]
    silent = [
        f"; rank {rank} is gone or hangs: it left no reason" for rank in others if rank not in words
    ]
    return "".join(told or silent)


def _record(error: BaseException) -> None:
    """For torchrun's own summary of what failed."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
