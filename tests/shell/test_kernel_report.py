"""benchmarks/kernel_report.py: the page of the training kernels, out of google-benchmark's JSON."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_report", BENCHMARKS / "kernel_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(report: ModuleType) -> set[str]:
    return {name for _, kernels in report.SECTIONS.values() for name in kernels}


def entries(name: str, time: float, unit: str = "us", **counters: float) -> list[dict[str, Any]]:
    """Two repetitions of one benchmark and their aggregates, as google-benchmark writes them."""
    common = {"run_name": name, "repetitions": 2, "time_unit": unit, **counters}
    single = {**common, "run_type": "iteration", "real_time": time}
    aggregate = {**common, "run_type": "aggregate"}
    return [
        single,
        single,
        {**aggregate, "aggregate_name": "mean", "real_time": 3 * time},
        {**aggregate, "aggregate_name": "median", "real_time": time},
        {**aggregate, "aggregate_name": "cv", "real_time": 0.04},
    ]


def test_every_benchmark_has_a_section(report: ModuleType) -> None:
    source = (BENCHMARKS / "kernels" / "training_bench.cpp").read_text(encoding="utf-8")
    assert names_of(report) == set(re.findall(r"BENCHMARK(?:_CAPTURE)?\((\w+)[,)]", source))


def test_page(report: ModuleType) -> None:
    counters = {"GFLOP/s": 512.0, "GB/s": 2.5, "limit_share": 0.876}
    benchmarks = []
    for name in names_of(report) - {"rope", "profile_scope_off"}:
        benchmarks += entries(f"{name}/1024/960/576/real_time", 2500.0, **counters)
    benchmarks += entries("rope/8192/real_time", 12.34, **{"GB/s": 30.0, "limit_share": 1.02})
    benchmarks += entries("profile_scope_off", 0.41, unit="ns")
    page = report.page({"benchmarks": benchmarks}, repetitions=2)
    for title in report.SECTIONS:
        assert f"\n## {title}\n" in page
    assert "| linear dgrad | 1024 rows, 576 to 960 | 2.50 ms | 4 % | 512 | 2.5 | **0.88** |" in page
    assert "| rope | 8192 rows | 12.3 µs | 4 % |  | 30.0 | **1.02** |" in page
    assert "| profile scope off |  | 0.41 ns | 4 % |  |  |  |" in page
    with pytest.raises(ValueError, match="without a section: gemm"):
        report.page({"benchmarks": benchmarks + entries("gemm/1", 1.0)}, repetitions=2)
