"""Whole runs of the command on a tiny random model: train, stop, resume, score, generate, eval."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from banyan.cli.main import main
from banyan.log.jsonl import by_step, read
from shell_files import write_model_dir, write_tiny_llama

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def argv(tmp_path, tiny):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(letter in 'aeiou' for letter in solution_str) / max(1, len(solution_str))\n"
    )
    return [
        "train",
        f"actor_rollout_ref.model.path={tiny}",
        "data.train_files='arithmetic:train?rows=40&seed=1'",
        "data.val_files='arithmetic:test?rows=6&seed=1'",
        "data.train_batch_size=4",
        "data.max_prompt_length=640",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        "trainer.logger=[console]",
    ]


def numbers(directory):
    """Metrics of each step but those that measure the machine."""
    measured = ("timing", "perf/", "actor/perf/")
    steps = by_step(read(directory / "metrics.jsonl"))
    return {
        step: {k: v for k, v in m.items() if not k.startswith(measured)}
        for step, m in steps.items()
    }


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, argv):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [*argv, "--share", "on"]  # auto would decide from the seconds of each folder
    assert main([*argv, f"trainer.default_local_dir={whole}"]) == 0
    there = f"trainer.default_local_dir={parts}"
    assert main([*argv, there, "trainer.total_training_steps=2"]) == 0
    assert main([*argv, there]) == 0
    assert numbers(parts) == numbers(whole)
    assert sorted(numbers(whole)) == [0, 1, 2, 3, 4]
    weights = "global_step_4/model.safetensors"
    assert (parts / weights).read_bytes() == (whole / weights).read_bytes()
    assert (parts / weights).read_bytes() != (
        parts / "global_step_2/model.safetensors"
    ).read_bytes()
    assert (parts / "report.html").is_file()


def test_sharing_off_gives_the_same_samples(tmp_path, argv):
    for mode in ("on", "off"):
        change = [f"trainer.default_local_dir={tmp_path / mode}", "trainer.total_training_steps=1"]
        assert main([*argv, *change, "--share", mode]) == 0
    first, second = numbers(tmp_path / "on")[1], numbers(tmp_path / "off")[1]
    assert first["critic/score/mean"] == second["critic/score/mean"]
    assert first["actor/entropy"] == pytest.approx(second["actor/entropy"], rel=1e-6)
    assert first["trie/ratio"] > 2
    assert second["trie/ratio"] == 1


def test_an_interrupt_saves_and_the_same_command_goes_on(tmp_path, argv):
    directory = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "banyan.cli.main",
        *argv,
        f"trainer.default_local_dir={directory}",
    ]
    command += [
        "trainer.total_training_steps=100000",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while (
        not read(directory / "metrics.jsonl")
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "press Ctrl-C again to stop at once" in out
    last = max(numbers(directory))
    assert (directory / f"global_step_{last}" / "state").is_dir()
    assert f"Stopped after step {last}." in (directory / "report.html").read_text()


def test_a_reward_function_that_always_fails_ends_the_run_with_1(tmp_path, argv, capsys):
    (tmp_path / "reward.py").write_text(
        "def compute_score(**arguments):\n    raise ValueError('no')\n"
    )
    assert main([*argv, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 1
    captured = capsys.readouterr()
    assert "left out" in captured.out
    assert "max_failed_frac" in captured.err
    assert "Traceback" not in captured.err


def test_a_damaged_model_file_is_the_users_mistake(tmp_path, argv, tiny, capsys):
    broken = write_model_dir(tmp_path / "broken")
    (broken / "config.json").write_text((tiny / "config.json").read_text())
    (broken / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:5000])
    argv[1] = f"actor_rollout_ref.model.path={broken}"
    assert main([*argv, f"trainer.default_local_dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert "model.safetensors" in err
    assert len(err.splitlines()) == 1


def test_score_shares_without_changing_a_number(tmp_path, tiny):
    rows = [
        {"id": 0, "text": "one two three"},
        {"id": 1, "text": "one two four"},
        {"id": 2, "input_ids": [65]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for share in ("on", "off"):
        out = tmp_path / f"{share}.jsonl"
        argv = [
            "score",
            "--model",
            str(tiny),
            "--in",
            str(tmp_path / "in.jsonl"),
            "--out",
            str(out),
            "--share",
            share,
        ]
        assert main(argv) == 0
        found[share] = out.read_text()
    assert found["on"] == found["off"]
    first = json.loads(found["on"].splitlines()[0])
    assert len(first["logprobs"]) == len(first["entropy"]) == len("one two three")
    assert first["logprobs"][0] is None
    assert all(value < 0 for value in first["logprobs"][1:])


def test_generate_and_eval(tmp_path, tiny, capsys):
    argv = ["generate", "--model", str(tiny), "--prompt", "2 + 3?", "--max-tokens", "5", "--n", "3"]
    assert main(argv) == 0
    first = capsys.readouterr().out
    assert first.count("---") == 2
    assert main(argv) == 0
    assert capsys.readouterr().out == first  # a seed gives the same text
    argv = [
        "eval",
        "--model",
        str(tiny),
        "--data",
        "arithmetic:test?rows=4",
        "--max-tokens",
        "4",
        "--n",
        "2",
    ]
    assert main([*argv, "--json", str(tmp_path / "e.json")]) == 0
    assert (
        "val-core/banyan/arithmetic/acc/mean@2"
        in json.loads((tmp_path / "e.json").read_text())["sampled"]
    )


def test_threads_are_left_to_the_environment(tiny):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = "from banyan import _C; assert _C.capabilities()['num_threads'] == 1"
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=60)
