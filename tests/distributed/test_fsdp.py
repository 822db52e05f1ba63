"""Processes that hold a part of every layer each (FSDP, ZeRO-3) give what one process gives."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from banyan.log.jsonl import by_step, read
from processes import HERE, run, torchrun
from test_data_parallel import MAIN, arguments, numbers, samples, tiny  # noqa: F401 (fixtures)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_and_weight_changes_equal_one_process(size, tiny):  # noqa: F811
    done = run(torchrun(size, str(HERE / "fsdp_worker.py"), str(tiny)))
    assert done.returncode == 0, done.stdout
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == {2: 4, 4: 3}[size], done.stdout
    for case in cases:
        bound = 1e-10 if case["case"].startswith("fp64") else 1e-5
        assert case["loss"] < bound, case
        assert case["gradients"] < bound, case
        assert case["changes"] < (1e-8 if bound == 1e-10 else 1e-3), case
        assert case.get("repeats", True), case
        assert case.get("as_zero_1", True), case


def in_parts(arguments: list[str], directory: Path) -> list[str]:  # noqa: F811
    return [
        *arguments,
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.fsdp_config.forward_prefetch=true",
        f"trainer.default_local_dir={directory}",
    ]


def test_a_run_in_parts_equals_one_process(tmp_path, arguments):  # noqa: F811
    one, two = tmp_path / "one", tmp_path / "two"
    arguments = [*arguments, "trainer.total_training_steps=5"]
    alone = run([sys.executable, *MAIN, *arguments, f"trainer.default_local_dir={one}"])
    assert alone.returncode == 0, alone.stdout
    both = run(torchrun(2, *MAIN, *in_parts(arguments, two)))
    assert both.returncode == 0, both.stdout
    wanted, got = numbers(one), numbers(two)
    assert sorted(got) == sorted(wanted) == [0, 1, 2, 3, 4, 5]
    expect_near(got, wanted)
    assert all(got[step]["actor/grad_norm"] > 0 for step in range(1, 6))
    assert samples(two) == samples(one)
    state = two / "global_step_5" / "state"
    assert sorted(path.name for path in state.iterdir()) == [
        "manifest.json",
        "rank_0_of_2.safetensors",
        "rank_1_of_2.safetensors",
    ]
    assert by_step(read(two / "metrics.jsonl"))[1]["comm/shard/all_gather_bytes"] > 0


@pytest.mark.slow
def test_one_process_goes_on_where_two_were_and_two_where_one_was(tmp_path, arguments):  # noqa: F811
    one, two = tmp_path / "one", tmp_path / "two"
    for directory, size in ((one, 1), (two, 2)):
        for steps in (2, 3):  # the second time over the other number of processes
            more = [*arguments, f"trainer.total_training_steps={steps}"]
            if size == 1:
                command = [sys.executable, *MAIN, *more, f"trainer.default_local_dir={directory}"]
            else:
                command = torchrun(2, *MAIN, *in_parts(more, directory))
            done = run(command)
            assert done.returncode == 0, done.stdout
            size = 3 - size
        assert "global_step_2 after step 2" in done.stdout
    expect_near(numbers(two), numbers(one))


def expect_near(got: dict, wanted: dict) -> None:
    for step, metrics in wanted.items():
        for name, value in metrics.items():
            assert got[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
