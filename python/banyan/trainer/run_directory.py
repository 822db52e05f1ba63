"""The folder of a run: created, and held by one run at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from banyan.errors import UserError


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Creates `directory` and keeps other runs out of it until the block ends, however it ends.

    Raises:
        UserError: naming trainer.default_local_dir when it cannot be written or another run has it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"trainer.default_local_dir: wanted a folder that can be written, got {directory}: {error.strerror}"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"trainer.default_local_dir: another run is writing into {directory}; "
                "wait for its end or choose another folder"
            ) from error
        yield
