"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def smollm2_directory() -> Path:
    """Where the converted SmolLM2-135M-Instruct lies (`make` puts it there)."""
    return Path(os.environ.get("BANYAN_TEST_MODEL", ROOT / ".cache/models/SmolLM2-135M-Instruct"))


needs_smollm2 = pytest.mark.skipif(
    not (smollm2_directory() / "config.json").exists(),
    reason="SmolLM2-135M-Instruct is not converted: run `make .cache/models/SmolLM2-135M-Instruct`",
)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return smollm2_directory()
