"""`schemathesis` against /openapi.json: whatever is sent, no 500, and 503 only where specified."""

from __future__ import annotations

import pytest
from serving_fixtures import Server, needs, run_program

pytest_plugins = ["serving_fixtures"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs("clients")
def test_schemathesis(tiny_server: Server) -> None:
    run_program("clients", "schemathesis_program.py", tiny_server, seconds=1700)
