"""The official `openai` client against `banyan serve`."""

from __future__ import annotations

import pytest
from serving_fixtures import Server, needs, run_program

pytest_plugins = ["serving_fixtures"]


@pytest.mark.slow
@needs("clients")
def test_openai_client(tiny_server: Server) -> None:
    run_program("clients", "openai_program.py", tiny_server)
