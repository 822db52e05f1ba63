"""`banyan bench`: its arithmetic, its host and child over a stand-in core, and the real core if built."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from banyan.bench.child import run_rollout, run_step
from banyan.bench.flops import TrieSize, trie_size, update_flops
from banyan.bench.work import PRESETS, find_gsm8k, find_preset, prompts_of
from banyan.convert import convert
from banyan.data.chat import Chat
from banyan.errors import UserError
from conftest import needs_smollm2
from test_convert import write_gguf

from banyan.bench import bars, child, cli, peers, rollout, scale

REPOSITORY = Path(__file__).resolve().parents[2]
HAS_CORE = importlib.util.find_spec("banyan._C") is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_gguf(folder / "Tiny.F32.gguf")
    return convert(str(folder / "Tiny.F32.gguf"), folder / "tiny")


def test_trie_size_by_hand() -> None:
    size = trie_size([([1, 2], [3, 4]), ([1, 2], [3, 5]), ([1, 2], [6])])
    # 1-2-3-{4, 5} and 1-2-6: depths 1 2 3 4 4 3; the sources 2 and 3 predict response tokens.
    assert size == TrieSize(logical=11, unique=6, pairs=1 + 2 + 3 + 4 + 4 + 3, head_rows=2)


def test_trie_size_equals_the_formula_of_one_level() -> None:
    p, r, n = 7, 5, 4
    samples = [(list(range(p)), [100 * i + t + 50 for t in range(r)]) for i in range(n)]
    size = trie_size(samples)
    assert size.logical == n * (p + r)
    assert size.unique == p + n * r
    assert size.pairs == p * (p + 1) // 2 + n * (p * r + r * (r + 1) // 2)
    assert size.head_rows == 1 + n * (r - 1)


def test_update_flops_of_smollm2(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert update_flops(TrieSize(0, 1, 0, 0), tmp_path) == pytest.approx(6 * 1.06e8, rel=0.01)
    assert update_flops(TrieSize(0, 0, 1, 0), tmp_path) == 12 * 576 * 30
    assert update_flops(TrieSize(0, 0, 0, 1), tmp_path) == 6 * 576 * 49152


@pytest.mark.skipif(not HAS_CORE, reason="the extension banyan._C is not built")
def test_the_machine_has_rates() -> None:
    from banyan import extension

    core = extension.load()
    assert 1e8 < core.bench_matrix_rate(tries=2) < 1e16
    memory = core.bench_memory(num_bytes=1 << 20)
    assert 1e7 < min(memory.values()) < 1e15


def test_generated_prompts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_TEST_DATA", str(tmp_path))
    prompts, source = prompts_of(PRESETS["gsm8k-8x8x128"], Chat(model))
    assert source == "generated"
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert prompts == prompts_of(PRESETS["gsm8k-8x8x128"], Chat(model))[0]


def test_gsm8k_prompts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k").mkdir()
    rows = [{"question": f"What is {i}?", "answer": f"It is #### {i}"} for i in range(9)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "gsm8k" / "train.jsonl").write_text(text)
    monkeypatch.setenv("BANYAN_TEST_DATA", str(tmp_path))
    assert find_gsm8k() == tmp_path / "gsm8k" / "train.jsonl"
    prompts, source = prompts_of(PRESETS["tiny-2x2x8"], Chat(model))
    assert (len(prompts), source) == (2, "gsm8k")
    assert "What is 1?" in Chat(model).decode(prompts[1])


class StandInCore:
    """Calls the host in the core's order; responses differ by sample, times by step."""

    def __init__(self) -> None:
        self.profiled: list[str] = []

    def capabilities(self) -> dict[str, Any]:
        return {"num_threads": 3}

    def bench_matrix_rate(self) -> float:
        return 1e12

    def bench_memory(self) -> dict[str, float]:
        return {"read_bytes_per_s": 1e10, "copy_bytes_per_s": 2e10}

    def profile_start(self) -> None:
        self.profiled.append(f"behind step {self.step}")

    def profile_stop(self, trace: str | None) -> list[dict[str, Any]]:
        self.profiled.append(f"to step {self.step}, trace {trace}")
        row = {"calls": 1, "seconds": 2.0, "repeated_flops": 10**12, "bytes": 10**10}
        return [
            {"op": "linear", "phase": "forward", **row, "flops": 10**12},
            {"op": "step", "phase": "other", **row, "flops": 0, "repeated_flops": 0, "bytes": 0},
        ]

    def train(self, config_json: str, host: Any) -> None:
        tree = json.loads(config_json)
        self.tree = tree
        rollout = tree["actor_rollout_ref"]["rollout"]
        step = 0
        while step < tree["trainer"]["total_training_steps"]:
            step += 1
            self.step = step
            rows = host.next_prompts(tree["data"]["train_batch_size"])
            trajectories = [
                {
                    "row": row["row"],
                    "index": i,
                    "prompt": row["tokens"],
                    "response": [3 + row["row"] + i] * rollout["response_length"],
                }
                for row in rows
                for i in range(rollout["n"])
            ]
            for trajectory in reversed(trajectories):
                host.submit(trajectory, False)
            scores = host.poll()
            assert len({score["value"] for score in scores}) > 1
            host.on_samples(step, False, trajectories, scores)
            host.log(step, self.metrics(step, trajectories))

    def metrics(self, step: int, trajectories: list[dict[str, Any]]) -> dict[str, float]:
        tokens = sum(len(t["prompt"]) + len(t["response"]) for t in trajectories)
        return {
            "timing_s/step": 10.0 - step,
            "timing_s/gen": 1.0,
            "timing_s/update_actor": 2.0,
            "perf/total_num_tokens": float(tokens),
            "trie/unique_tokens": tokens / 2,
            "trie/computed_tokens": tokens / 2,
            "perf/state_bytes": 100.0,
            "perf/update_peak_bytes": 100.0 + step,
        }


def spec_of(model: Path, folder: Path, what: str) -> dict[str, Any]:
    return {
        "what": what,
        "model": str(model),
        "prompts": [[5, 6, 7], [5, 6, 8, 9]],
        "group_size": 2,
        "response_length": 8,
        "micro_batch": 2,
        "share": "on",
        "kernels": "native",
        "repeats": 2,
        "with_mfu": True,
        "profile": False,
        "trace": None,
        "work_file": str(folder / "work.json"),
        "result_file": str(folder / "result.json"),
    }


def test_child_reports_the_median_counted_step(model: Path, tmp_path: Path) -> None:
    core = StandInCore()
    result = run_step(spec_of(model, tmp_path, "step"), core)
    assert result["all_step_seconds"] == [9.0, 8.0, 7.0]  # the fourth never runs: no checkpoint
    assert result["stages"] == {"step": 8.0, "gen": 1.0, "update_actor": 2.0}
    assert result["activation_peak_bytes"] == 3.0
    assert result["threads"] == 3
    assert result["peak_bytes"] > 1 << 20
    assert result["logical_tokens"] == 2 * (3 + 8) + 2 * (4 + 8)
    assert result["mfu"] == pytest.approx(
        result["update_flops"] / 2.0 / result["matrix_flops_per_s"]
    )
    work = json.loads((tmp_path / "work.json").read_text())
    assert work["responses"] == [[3] * 8, [4] * 8, [4] * 8, [5] * 8]
    actor = core.tree["actor_rollout_ref"]
    assert actor["rollout"]["ignore_eos"] is True
    assert actor["sharing"]["mode"] == "on"
    assert actor["actor"]["ppo_micro_batch_size_per_gpu"] == 2


def test_child_profiles_one_more_step(model: Path, tmp_path: Path) -> None:
    core = StandInCore()
    result = run_step({**spec_of(model, tmp_path, "step"), "profile": True, "trace": "t"}, core)
    assert core.profiled == ["behind step 3", "to step 4, trace t"]
    assert result["stages"]["step"] == 8.0  # of the timed steps
    found = result["profile"]
    assert (found["seconds"], found["timed_seconds"]) == (6.0, 8.0)
    assert (found["flops_per_s"], found["bytes_per_s"]) == (1e12, 2e10)
    linear, step = found["rows"]
    assert (linear["GFLOP_per_s"], linear["GB_per_s"]) == (1000.0, 5.0)
    assert (linear["limit_seconds"], linear["limit_share"]) == (2.0, 1.0)
    assert step["limit_share"] is None
    assert found["update_flops"] == 10**12  # what is done again does not count
    assert found["closed_form_flops"] == result["update_flops"]


def test_child_refuses_a_short_response(model: Path, tmp_path: Path) -> None:
    class Short(StandInCore):
        def metrics(self, step: int, trajectories: list[dict[str, Any]]) -> dict[str, float]:
            trajectories[0]["response"].pop()
            return super().metrics(step, trajectories)

    with pytest.raises(ValueError, match="wanted 4 responses of 8 tokens"):
        run_step(spec_of(model, tmp_path, "step"), Short())


def test_ratios() -> None:
    on = {
        "stages": {"step": 10.0, "gen": 4.0, "update_actor": 5.0},
        "activation_peak_bytes": 2,
    }
    others = {
        "trl_step": {"seconds": 40.0},
        "transformers_update": {"seconds": 15.0, "peak_bytes": 7, "activation_peak_bytes": 5},
        "transformers_generate": {"seconds": 20.0},
    }
    assert cli.ratios(on, others) == {
        "step_ratio_trl": 4.0,
        "update_ratio_transformers": 3.0,
        "generate_ratio_transformers": 5.0,
        "peak_bytes_transformers": 7,
        "activation_peak_bytes_transformers": 5,
        "activation_peak_ratio_transformers": 0.4,
    }
    assert cli.ratios(on, {}) == {}


def test_bars(capsys: pytest.CaptureFixture[str]) -> None:
    found = bars.held({"mfu": 0.5, "step_ratio_trl": 9.9, "cost_of_twice_the_tokens": 2.0})
    assert {key: entry["holds"] for key, entry in found.items()} == {
        "mfu": True,
        "step_ratio_trl": False,
        "cost_of_twice_the_tokens": True,
    }
    assert found["step_ratio_trl"]["bar"] == ">= 10"
    bars.print_bars(found)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "holds" in line or "MISSED" in line] == [
        "mfu",
        "step_ratio_trl",
        "cost_of_twice_the_tokens",
    ]


def test_figures_of_scale() -> None:
    sharing = {"ratio": 6.6, "efficiency": 0.97, "off": {"median": 50.0}}
    growth = {
        "passes": [{"median": 10.0}, {"median": 20.5}],
        "planning": {"median": 0.4, "unique_tokens": 600_000},
    }
    assert scale.figures(sharing, 200.0, growth, 0.001) == {
        "sharing_ratio_P4kR256n16": 6.6,
        "sharing_efficiency_P4kR256n16": 0.97,
        "sharing_off_ratio_transformers_P4kR256n16": 4.0,
        "cost_of_twice_the_tokens": 2.05,
        "planner_share_1M_tokens": pytest.approx(0.4 / 600),
    }
    measured = set(scale.figures(sharing, 200.0, growth, 0.001)) | {
        "update_ratio_transformers",
        "mfu",
        "step_ratio_trl",
        "activation_peak_ratio_transformers",
    }
    assert {bar.key for bar in bars.BARS} <= measured


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def test_wrong_arguments(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--preset: wanted one of gsm8k-8x8x128"):
        find_preset("gsm8k")
    with pytest.raises(UserError, match="--profile: wanted `banyan bench step`, got trie"):
        cli.run(parse("trie", "--model", str(model), "--profile"))
    with pytest.raises(UserError, match="--trace: wanted --profile"):
        cli.run(parse("step", "--model", str(model), "--trace", "file"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="banyan convert"):
        cli.run(parse("step"))
    with pytest.raises(UserError, match="--model"):
        cli.run(parse("step", "--model", str(tmp_path / "none")))


def test_missing_peers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks" / "peers").mkdir(parents=True)
    (tmp_path / "benchmarks" / "peers" / "common.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run `make peers`"):
        cli.run(parse("step", "--model", str(model), "--peers"))


def test_a_failing_child_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3:\nlast words"):
        peers.run(["/bin/sh", "-c", "echo last words; exit 3"], tmp_path / "log")


@pytest.mark.skipif(not HAS_CORE, reason="the extension banyan._C is not built")
def test_step_with_the_core(model: Path, tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["--model", str(model), "--preset", "tiny-2x2x8", "--repeats", "1"]
    assert cli.run(parse("step", *arguments, "--json", str(result_file))) == 0
    result = json.loads(result_file.read_text())
    assert result["share_on_ratio"] > 0
    assert result["peak_bytes"] > 1 << 20
    assert result["unique_tokens"] < result["logical_tokens"]
    assert result["stages"]["gen"] > 0
    assert "mfu" in result


@pytest.mark.skipif(not HAS_CORE, reason="the extension banyan._C is not built")
def test_profile_with_the_core(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file, trace_file = tmp_path / "result.json", tmp_path / "trace.json"
    arguments = ["--model", str(model), "--preset", "tiny-1x2x8", "--repeats", "1", "--profile"]
    files = ["--json", str(result_file), "--trace", str(trace_file)]
    assert cli.run(parse("step", *arguments, *files)) == 0
    found = json.loads(result_file.read_text())["profile"]
    assert found["update_flops"] == found["closed_form_flops"] > 0
    rows = {(row["phase"], row["op"]): row for row in found["rows"]}
    assert {"rollout", "forward", "loss", "backward", "optimizer"} <= {p for p, _ in rows}
    assert rows["backward", "attention backward"]["repeated_flops"] > 0
    assert rows["optimizer", "AdamW"]["calls"] == 1
    assert "furthest above the limit" in capsys.readouterr().out
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"step", "forward", "attention", "AdamW"}
    step = next(event for event in events if event["name"] == "step")
    # Each op's own time: together the step.
    total = sum(row["seconds"] for row in found["rows"])
    assert total == pytest.approx(step["dur"] * 1e-6, rel=1e-3)
    for event in events:
        assert step["ts"] <= event["ts"] + 0.002
        assert event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 0.002


@pytest.mark.skipif(not HAS_CORE, reason="the extension banyan._C is not built")
def test_growth_with_the_core(model: Path, tmp_path: Path) -> None:
    from banyan import extension

    core = extension.load()
    spec = {"model": str(model), "kernels": "native", "repeats": 1}
    presets = ["P20R9n4x2", "P20R9n4x4"]
    result = scale.run_growth({**spec, "presets": presets, "million": "P20R9n4x8"}, core)
    assert [side["unique_tokens"] for side in result["passes"]] == [112, 224]
    assert [side["blocks"] for side in result["passes"]] == [1, 2]  # of at most eight samples
    assert result["planning"]["logical_tokens"] == 8 * 116
    assert result["planning"]["median"] > 0
    work_file = tmp_path / "sequences.json"
    spec |= {"preset": "P20R9n4", "work_file": str(work_file)}
    assert scale.run_sharing(spec, core)["unique_tokens"] == 56
    sequences = json.loads(work_file.read_text())["sequences"]
    assert [len(s["tokens"]) for s in sequences] == [29] * 4
    assert [sum(s["scored"]) for s in sequences] == [9] * 4


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CORE, reason="the extension banyan._C is not built")
def test_every_bar_is_measured_in_one_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command over a tiny model; the peers are figures."""

    def measure(name: str, model: Path, work_file: Path, folder: Path) -> dict[str, Any]:
        assert work_file.is_file()
        weights = {"weights": "fp32", "peak_bytes": 1 << 40, "activation_peak_bytes": 1 << 40}
        return {"seconds": 1000.0, **weights}

    monkeypatch.setattr(peers, "check", lambda names: None)
    monkeypatch.setattr(peers, "measure", measure)
    monkeypatch.setattr(scale, "TOKENS", ("P20R9n4x1", "P20R9n4x2"))
    monkeypatch.setattr(scale, "MILLION", "P20R9n4x4")
    sharing = "P20R9n4"  # in place of the long prompt; the keys keep its name
    run_sharing = cli.Bench._child

    def child(self: Any, what: str, spec: dict[str, Any], words: str) -> dict[str, Any]:
        spec = {**spec, "preset": sharing} if what == "sharing" else spec
        return run_sharing(self, what, spec, words)

    monkeypatch.setattr(cli.Bench, "_child", child)
    result_file = tmp_path / "result.json"
    arguments = ["--model", str(model), "--preset", "tiny-1x2x8", "--repeats", "1", "--peers"]
    assert cli.run(parse("step", *arguments, "--json", str(result_file))) == 0
    result = json.loads(result_file.read_text())
    assert list(result["bars"]) == [bar.key for bar in bars.BARS]
    assert result["bars"]["update_ratio_transformers"]["holds"]
    assert result["bars"]["activation_peak_ratio_transformers"]["holds"]
    printed = capsys.readouterr().out
    for bar in bars.BARS:
        assert bar.key in printed


@pytest.mark.skipif(not HAS_CORE, reason="the extension banyan._C is not built")
def test_rollout_with_the_core(model: Path, tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["--model", str(model), "--preset", "tiny-2x2x8", "--repeats", "3"]
    assert cli.run(parse("rollout", *arguments, "--json", str(result_file))) == 0
    result = json.loads(result_file.read_text())
    found = result["presets"]["tiny-2x2x8"]
    assert (found["B"], found["r"], found["n"]) == (4, 8, 2)
    assert found["tokens_per_s"] == pytest.approx(4 * 8 / found["seconds"])
    assert found["limit_fraction"] == pytest.approx(
        found["tokens_per_s"] / found["limit_tokens_per_s"]
    )
    assert 0 < found["limit_fraction"] < found["limit_fraction_with_prompts"]
    assert result["rates"]["rows"] == 64
    assert result["grouped_ratio"] == result["grouped"]["ratio"]
    assert result["threads"] >= 1
    assert "limit_fraction" not in result  # of the preset 8x8 only


@pytest.mark.skipif(not HAS_CORE, reason="the extension banyan._C is not built")
def test_trie_with_the_core(model: Path, tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    arguments = ["--model", str(model), "--repeats", "1", "--json", str(result_file), "--preset"]
    assert cli.run(parse("trie", *arguments, "P20R9n4")) == 0
    result = json.loads(result_file.read_text())
    assert (result["logical_tokens"], result["unique_tokens"]) == (116, 56)
    assert result["efficiency"] == pytest.approx(result["ratio"] / result["ideal"])
    assert 1 < result["ideal"] < 4
    assert min(result["peak_bytes_on"], result["peak_bytes_off"]) > 1 << 20
    assert result["on"]["loss"] == pytest.approx(result["off"]["loss"])
    assert cli.run(parse("trie", *arguments, "P20R9n4", "alone2")) == 0
    result = json.loads(result_file.read_text())
    assert result["alone2"]["ideal"] == 1.0
    assert result["P20R9n4"]["unique_tokens"] == 56
    with pytest.raises(ValueError, match=r"\[bench\] --preset: wanted P<p>R<r>n<n>"):
        cli.run(parse("trie", *arguments, "alone"))


def environment(peer: str) -> Path:
    return REPOSITORY / "build" / "peers" / peers.PEERS[peer][0]


STEP_PEERS = ["transformers_update", "transformers_generate", "trl_step"]


def each(names: list[str]) -> list[Any]:
    """The peers as parameters; those without an environment are left out by name."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not (environment(name) / ".installed").is_file(),
                reason=f"{environment(name)} is missing: make peers",
            ),
        )
        for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", each(STEP_PEERS))
def test_peers_run(model: Path, tmp_path: Path, name: str) -> None:
    work = {
        "prompts": [[5, 6, 7], [5, 6, 8, 9]],
        "responses": [[30 + i] * 8 for i in range(16)],
        "rewards": [i / 16 for i in range(16)],
    }
    (tmp_path / "work.json").write_text(json.dumps(work))
    result = peers.measure(name, model, tmp_path / "work.json", tmp_path)
    check_peer(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", each(["transformers_sequence"]))
def test_sequence_peer_has_the_loss_of_the_core(model: Path, tmp_path: Path, name: str) -> None:
    from banyan import extension

    spec = {"model": str(model), "kernels": "native", "repeats": 1, "preset": "P20R9n4"}
    work_file = tmp_path / "sequences.json"
    ours = scale.run_sharing({**spec, "work_file": str(work_file)}, extension.load())
    result = peers.measure(name, model, work_file, tmp_path)
    check_peer(result)
    assert result["loss"] == pytest.approx(ours["off"]["loss"], rel=0.01)


def check_peer(result: dict[str, Any]) -> None:
    assert result["seconds"] > 0
    assert result["weights"] in ("fp32", "bf16", "float32")
    assert result["peak_bytes"] > 1 << 20


@pytest.mark.slow
@needs_smollm2
@pytest.mark.parametrize("name", each(["vllm", "transformers", "llama_cpp"]))
def test_rollout_peers_run(smollm2: Path, tmp_path: Path, name: str) -> None:
    rollouts = {
        "1x1": {"prompts": [[5, 6, 7]], "group_size": 1, "response_length": 8},
        "2x2": {"prompts": [[5, 6, 7], [5, 6, 8, 9]], "group_size": 2, "response_length": 8},
    }
    (tmp_path / "work.json").write_text(json.dumps({"rollouts": rollouts}))
    result = peers.measure(name, smollm2, tmp_path / "work.json", tmp_path, repeats=2)
    assert list(result["rollouts"]) == ["1x1", "2x2"]
    assert (result["weights"], result["threads"]) == ("bf16", len(os.sched_getaffinity(0)))
    for found, sequences in zip(result["rollouts"].values(), (1, 4), strict=True):
        assert len(found["all_seconds"]) == 2
        assert found["tokens_per_s"] == pytest.approx(sequences * 8 / found["seconds"])


class RolloutCore:
    """Calls back as the engine does; a clock that the test turns stands for time."""

    class Model:
        load = staticmethod(lambda path, **options: object())

    class Engine:
        def __init__(self, model: Any, options: dict[str, Any]) -> None:
            assert options == {"max_model_len": 12}

        def generate(self, rows: list, params: dict, on_finished: Any) -> dict[str, Any]:
            assert params["ignore_eos"] is True
            for row in rows:
                for i in range(row["n"]):
                    trajectory = {"row": row["row"], "index": i, "prompt": row["tokens"]}
                    on_finished({**trajectory, "response": [9] * 8})
            return {"computed_prompt_tokens": 5, "num_passes": 9}

    @staticmethod
    def bench_rates(model: Any) -> dict[str, Any]:
        return {"flops_per_s": 2e9, "bytes_per_s": 1e9}

    @staticmethod
    def bench_limit(model: Any, prompts: list[int], n: int, new: int, f: float, b: float) -> dict:
        assert (prompts, n, new, f, b) == ([3, 4], 2, 8, 2e9, 1e9)
        return {"bytes": 1e9, "flops": 2e9, "decode_seconds": 0.5, "prompt_seconds": 0.25}

    @staticmethod
    def bench_grouped(model: Any, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "ratio": 2.0}

    @staticmethod
    def capabilities() -> dict[str, Any]:
        return {"num_threads": 3}


def test_rollout_child(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 10.0, 11.0, 20.0, 22.0, 30.0, 34.0])  # runs of 9, 1, 2 and 4 s
    monkeypatch.setattr(child.time, "perf_counter", lambda: next(times))
    spec = spec_of(model, tmp_path, "rollout")
    keys = ("prompts", "group_size", "response_length")
    spec |= {"repeats": 3, "grouped": {"n": 4}}
    spec["presets"] = {"8x8": {key: spec.pop(key) for key in keys}}
    result = run_rollout(spec, RolloutCore)
    found = result["presets"]["8x8"]
    assert found["all_seconds"] == [1.0, 2.0, 4.0]  # the first run warms up
    assert found["seconds"] == 2.0
    assert (found["B"], found["p"], found["r"], found["n"]) == (4, 3.5, 8, 2)
    assert found["tokens_per_s"] == 16.0
    assert (found["GB_per_s"], found["GFLOP_per_s"]) == (0.5, 1.0)
    assert found["limit_tokens_per_s"] == 64.0
    assert found["limit_fraction"] == 0.25
    assert found["limit_fraction_with_prompts"] == 0.375
    assert result["threads"] == 3
    assert result["grouped"] == {"n": 4, "ratio": 2.0}


def test_rollout_ratios() -> None:
    ours = {
        "presets": {
            name: {"tokens_per_s": rate, "limit_fraction": 0.6, "limit_fraction_with_prompts": 0.7}
            for name, rate in {"1x1": 60.0, "8x8": 1800.0, "16x8": 2000.0}.items()
        },
        "grouped": {"ratio": 1.7},
    }
    rates = {"1x1": 20.0, "8x8": 400.0, "16x8": 500.0}
    rollouts = {name: {"tokens_per_s": rate} for name, rate in rates.items()}
    others = {
        "vllm": {"rollouts": rollouts},
        "transformers": {"rollouts": {"8x8": {"tokens_per_s": 100.0}}},
        "llama_cpp": {"rollouts": {"1x1": {"tokens_per_s": 120.0}}},
    }
    assert rollout.ratios(ours, others) == {
        "grouped_ratio": 1.7,
        "limit_fraction": 0.6,
        "limit_fraction_with_prompts": 0.7,
        "vllm_ratio_1x1": 3.0,
        "vllm_ratio_8x8": 4.5,
        "vllm_ratio_16x8": 4.0,
        "generate_ratio_transformers": 18.0,
        "llama_cpp_ratio_1x1": 0.5,
    }
