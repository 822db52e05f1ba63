"""Mixed load on the engine for some seconds: every request is accounted for, pages and memory stay flat.

`make soak` (tests/shell/rollout_soak.py) runs the same for 30 minutes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from rollout_soak import soak

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None, reason="the extension banyan._C is not built"
)


def test_soak(tmp_path: Path) -> None:
    report = soak(tmp_path, seconds=8.0, seed=1)
    assert report["finished"] > 50
    assert report["aborted"] > 0
    assert report["refused"] > 0
    assert report["preempted"] > 0
    assert report["updates"] > 0
