"""Fixtures of the HTTP service's tests: a model directory and a server over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_running import Running, running
from shell_files import write_model_dir


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(served_model: Path) -> Iterator[Running]:
    with running(served_model) as found:
        yield found
