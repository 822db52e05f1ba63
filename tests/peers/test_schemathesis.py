"""`schemathesis` against /openapi.json: whatever is sent, no 500, and 503 only where specified."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving_fixtures import Server, free_port, needs, run_program, serving

pytest_plugins = ["serving_fixtures"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs("clients")
def test_schemathesis(tiny_server: Server) -> None:
    run_program("clients", "schemathesis_program.py", tiny_server, seconds=1700)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs("clients")
def test_control_routes(tiny_model: Path, tmp_path: Path) -> None:
    port, token = free_port(), tmp_path / "token"
    control = ["--admin-port", str(port), "--admin-token-file", str(token)]
    with serving(tiny_model, tmp_path, *control, "--kv-cache-memory-bytes", "16M") as server:
        where = {"BANYAN_URL": f"http://127.0.0.1:{port}", "BANYAN_KEY": token.read_text().strip()}
        run_program("clients", "schemathesis_program.py", server, seconds=1700, **where)
