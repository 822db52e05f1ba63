"""The command line: exit codes, one line per mistake, and torch left alone until a model is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from banyan.cli import main as cli
from banyan.cli.main import VERBS, main
from shell_files import data_row, write_jsonl

pytest_plugins = ["shell_fixtures"]


def run(argv, capsys):
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help(verb, capsys):
    code, out, _ = run([verb, "--help"], capsys)
    assert code == 0
    assert out.startswith(f"usage: banyan {verb}")


def test_help_and_unknown_commands(capsys):
    assert run(["--help"], capsys)[0] == 0
    assert run([], capsys)[0] == 2
    code, _, err = run(["tain"], capsys)
    assert code == 2
    assert "unknown command 'tain'" in err
    assert run(["--version"], capsys)[1].startswith("banyan ")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (["actor_rollout_ref.rollout.temprature=1"], "unknown key"),
        (["--no-such-option"], "unrecognized arguments"),
        (["--config-path", "nowhere"], "--config-path: wanted a folder"),
        (["data.train_files=nowhere.jsonl"], "no such file"),
        (["--share", "maybe"], "invalid choice"),
    ],
)
def test_wrong_input_exits_with_2_and_no_traceback(arguments, change, text, capsys):
    code, _, err = run(["train", *arguments, *change], capsys)
    assert code == 2
    assert text in err
    assert "Traceback" not in err


def test_other_failures_exit_with_1(monkeypatch, capsys):
    class Broken:
        @staticmethod
        def add_arguments(parser):
            pass

        @staticmethod
        def run(args):
            raise RuntimeError("a fault of ours")

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Broken)
    code, _, err = run(["doctor"], capsys)
    assert code == 1
    assert "a fault of ours" in err


def test_a_dry_run_checks_everything_and_stops(arguments, capsys):
    code, out, _ = run(["train", "--dry-run", *arguments, "--share", "off"], capsys)
    assert code == 0
    assert "8 training rows" in out
    code, _, err = run(
        ["train", "--dry-run", *arguments, "reward.custom_reward_function.name=absent"], capsys
    )
    assert code == 0  # without a file the name is not looked at
    broken = f"reward.custom_reward_function.path={write_broken_reward(arguments)}"
    code, _, err = run(["train", "--dry-run", *arguments, broken], capsys)
    assert code == 2
    assert "Traceback" not in err


def write_broken_reward(arguments):
    path = Path(arguments[1].partition("=")[2]).with_name("reward.py")
    path.write_text("def compute_score(:\n")
    return path


def test_config_errors_help_and_data_errors_do_not_load_torch(arguments, tmp_path):
    write_jsonl(tmp_path / "bad.jsonl", [data_row(prompt=None)])
    bad_data = [*arguments, f"data.train_files={tmp_path / 'bad.jsonl'}"]
    code = (
        "import sys\nfrom banyan.cli.main import main\n"
        f"codes = [main(['--help']), main(['train', 'nonsense=1']), main(['train', *{bad_data!r}])]\n"
        "assert codes == [0, 2, 2], codes\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_verls_entry_module_takes_the_same_arguments(arguments):
    argv = [sys.executable, "-m", "banyan.trainer.main_ppo", "--dry-run", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "dry run" in done.stdout


def test_config_explain_and_show(capsys):
    code, out, _ = run(["config", "explain", "actor_rollout_ref.actor.optim.lr"], capsys)
    assert code == 0
    assert "Learning rate of AdamW at its peak." in out
    assert "default: 1e-06" in out
    assert (
        "verl's default: false"
        in run(
            ["config", "explain", "actor_rollout_ref.actor.fsdp_config.use_orig_params"], capsys
        )[1]
    )
    assert (
        "actor_rollout_ref.rollout.val_kwargs.n"
        in run(["config", "explain", "actor_rollout_ref.rollout"], capsys)[1]
    )
    code, _, err = run(["config", "explain", "data.sed"], capsys)
    assert code == 2
    assert "nearest known key is data.seed" in err
    code, out, _ = run(["config", "show", "data.seed=3"], capsys)
    assert code == 0
    assert "seed: 3" in out
    assert "train_files: null" in out


def test_data_commands_write_rows(tmp_path, capsys):
    out = tmp_path / "a.jsonl"
    assert (
        run(["data", "arithmetic", "--out", str(out), "--rows", "7", "--seed", "1"], capsys)[0] == 0
    )
    assert len(out.read_text().splitlines()) == 7
    source = write_jsonl(tmp_path / "test.jsonl", [{"question": "q", "answer": "#### 1"}])
    assert (
        run(["data", "gsm8k", "--in", str(source), "--out", str(tmp_path / "g.parquet")], capsys)[0]
        == 0
    )
    code, _, err = run(["data", "arithmetic", "--out", str(tmp_path / "a.csv")], capsys)
    assert code == 2
    assert "wanted a name ending in" in err


def test_score_and_generate_check_rows_before_a_model_loads(tmp_path, model_dir, capsys):
    for rows, text in [
        ([{"text": "x"}], "column 'id'"),
        ([{"id": 1}], "wanted input_ids"),
        ([{"id": 1, "input_ids": []}], "wanted at least one token"),
        ([], "wanted at least one row"),
    ]:
        source = write_jsonl(tmp_path / "in.jsonl", rows)
        argv = [
            "score",
            "--model",
            str(model_dir),
            "--in",
            str(source),
            "--out",
            str(tmp_path / "out.jsonl"),
        ]
        code, _, err = run(argv, capsys)
        assert code == 2
        assert text in err
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": 3}])
    code, _, err = run(["generate", "--model", str(model_dir), "--in", str(source)], capsys)
    assert code == 2
    assert "in.jsonl:1: column 'prompt'" in err


class StandInCore:
    """banyan._C as generate, eval and score use it."""

    class Model:
        shape = {"vocab": 259}  # noqa: RUF012

        @classmethod
        def load(cls, directory, dtype, device, kernels):
            return cls()

    class Engine:
        def __init__(self, model, options):
            self.options = options

        def generate(self, rows, params, on_finished):
            for row in rows:
                for index in range(row["n"]):
                    # "#### 5" in the byte tokenizer of the tests, then the stop token
                    text = [self.ids[letter] for letter in ("#", "#", "#", "#", "Ġ", "5")]
                    item = {
                        "row": row["row"],
                        "index": index,
                        "response": [*text, 257],
                        "finish": "stop",
                    }
                    on_finished(item)
            return {"response_tokens": 7 * len(rows), "seconds": 0.5}

    @staticmethod
    def score(model, samples, share, temperature, max_tokens_per_block):
        values = [[-1.0] * (len(sample) - 1) for sample in samples]
        total = sum(len(sample) for sample in samples)
        return {
            "logprobs": values,
            "entropy": values,
            "logical_tokens": total,
            "unique_tokens": total - 2,
        }


@pytest.fixture
def core(monkeypatch, model_dir):
    vocabulary = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
    monkeypatch.setattr(StandInCore.Engine, "ids", vocabulary, raising=False)
    monkeypatch.setattr("banyan.extension.load", lambda: StandInCore)
    return StandInCore


def test_score_writes_one_entry_per_token(tmp_path, model_dir, core, capsys):
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"id": "a", "text": "abc"}, {"id": 2, "input_ids": [5]}]
    )
    out = tmp_path / "out.jsonl"
    argv = [
        "score",
        "--model",
        str(model_dir),
        "--in",
        str(source),
        "--out",
        str(out),
        "--share",
        "off",
    ]
    assert run(argv, capsys)[0] == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0] == {"id": "a", "logprobs": [None, -1.0, -1.0], "entropy": [None, -1.0, -1.0]}
    assert rows[1]["logprobs"] == [None]
    write_jsonl(source, [{"id": 1, "input_ids": [1, 999]}])
    code, _, err = run(argv, capsys)
    assert code == 2
    assert "wanted token ids in [0, 259), got 999" in err


def test_generate_prints_and_writes(tmp_path, model_dir, core, capsys):
    code, out, _ = run(
        ["generate", "--model", str(model_dir), "--prompt", "2 + 3?", "--n", "2"], capsys
    )
    assert code == 0
    assert out == "#### 5\n---\n#### 5\n"
    argv = [
        "generate",
        "--model",
        str(model_dir),
        "--prompt",
        "x",
        "--out",
        str(tmp_path / "g.jsonl"),
    ]
    assert run(argv, capsys)[0] == 0
    assert json.loads((tmp_path / "g.jsonl").read_text())["finish"] == ["stop"]


def test_eval_reports_sampled_and_greedy_accuracy(tmp_path, model_dir, train_file, core, capsys):
    out = tmp_path / "eval.json"
    argv = [
        "eval",
        "--model",
        str(model_dir),
        "--data",
        str(train_file),
        "--n",
        "2",
        "--json",
        str(out),
    ]
    code, text, err = run(argv, capsys)
    assert code == 0, err
    numbers = json.loads(out.read_text())
    assert numbers["sampled"]["val-core/openai/gsm8k/acc/mean@2"] == pytest.approx(1 / 8)
    assert numbers["greedy"]["val-core/openai/gsm8k/acc/mean@1"] == pytest.approx(1 / 8)
    assert text.startswith("sampled: openai/gsm8k/acc")
