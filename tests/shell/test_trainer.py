"""The host and the run around the core, with a stand-in core that walks the same calls as the trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest
from banyan.config.resolve import resolve
from banyan.errors import RunError, UserError
from banyan.log.jsonl import read
from banyan.trainer import inputs as run_inputs
from banyan.trainer.interrupt import Interrupt
from banyan.trainer.main_ppo import train
from shell_files import data_row, write_jsonl

pytest_plugins = ["shell_fixtures"]


class StandInCore:
    """Answers every prompt with '#### <n>', as train/trainer.cpp would call the host."""

    def __init__(self, answers=("5", "6"), resume=None, fail=None, numbers=None, refills=False):
        self.answers, self.resume, self.fail = answers, resume, fail
        self.numbers = numbers  # of a reward model, by answer
        self.refills = refills  # draws more rows in every step, as a group filter does
        self.config, self.states, self.rows, self.scores = {}, [], [], []

    def total_steps(self, config_json):
        return json.loads(config_json)["trainer"]["total_training_steps"]

    def mesh_shape(self, config_json):
        return {}

    def train(self, config_json, host):
        self.config = json.loads(config_json)
        if self.fail == "load":
            raise OSError("model.safetensors: wanted 10 bytes, got 3")
        step = 0
        if self.resume:
            host.load_state(self.resume["state"])
            step = self.resume["step"]
        if self.config["trainer"]["val_before_train"] and step == 0:
            self.finish(host, 0, host.validation_prompts(), {}, validation=True)
        while step < self.config["trainer"]["total_training_steps"] and not host.should_stop():
            step += 1
            rows = host.next_prompts(self.config["data"]["train_batch_size"])
            self.rows.append([row["row"] for row in rows])
            if self.refills:
                host.next_prompts(2)
            if self.fail == "step":
                raise ValueError("[reward] 3 of 4 samples could not be scored")
            metrics = {"critic/score/mean": 0.1 * step, "timing_s/step": 0.5, "timing_s/gen": 0.3}
            metrics |= {"trie/logical_tokens": 100.0, "trie/unique_tokens": 40.0, "trie/ratio": 2.5}
            self.finish(host, step, rows, metrics, validation=False)
            self.states.append({"step": step, "state": host.save_state()})
        return {
            "first_step": 0,
            "last_step": step,
            "checkpoint": "run/global_step_3",
            "stopped_early": False,
        }

    def finish(self, host, step, rows, metrics, validation):
        trajectories = []
        for row in rows:
            for index, answer in enumerate(self.answers):
                item = {
                    "row": row["row"],
                    "index": index,
                    "prompt": row["tokens"],
                    "finish": "stop",
                }
                item["response"] = list(encode(host, f"#### {answer}"))
                trajectories.append(item)
                if self.numbers:
                    assert host.reward_model_tokens(trajectories, validation) is None
                    item["reward_model_score"] = self.numbers[index]
                host.submit(item, validation)
        scores = host.poll()
        self.scores.append(scores)
        host.on_samples(step, validation, trajectories, scores)
        if validation:
            metrics = {**metrics, **host.validation_metrics(trajectories, scores)}
        host.log(step, metrics)


def encode(host, text):
    return host._chat.encode(text)


def run_with(core, argv):
    config = resolve(argv, environ={})
    return train(config, run_inputs.load(config), core)


def test_a_run_scores_logs_and_reports(tmp_path, arguments, train_file, capsys):
    core = StandInCore()
    dumps = f"trainer.rollout_data_dir={tmp_path / 'dumps'}"
    assert run_with(core, [*arguments, f"data.val_files={train_file}", dumps]) == 0
    directory = tmp_path / "run"
    lines = read(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    # Two of the eight problems have the answer 5 or 6; each of those has one right sample of two.
    assert lines[0]["val-core/openai/gsm8k/acc/mean@2"] == pytest.approx(2 * 0.5 / 8)
    assert lines[0]["val-core/openai/gsm8k/acc/best@2/mean"] == pytest.approx(2 / 8)
    assert core.config["_shell"]["num_train_rows"] == 8
    assert core.config["_shell"]["stop_ids"] == [257, 258]
    dump = [json.loads(line) for line in (tmp_path / "dumps" / "1.jsonl").read_text().splitlines()]
    assert len(dump) == 8
    assert dump[0].keys() >= {"input", "output", "gts", "score", "step", "uid", "acc"}
    assert {record["output"] for record in dump} == {"#### 5", "#### 6"}
    assert (directory / "report.html").is_file()
    out = capsys.readouterr().out
    assert "step 3/3  reward 0.300  sharing 2.50x  0.5 s" in out
    assert "120 of 300" in out
    assert out.strip().splitlines()[-1] == f"report: {directory / 'report.html'}"


def test_resuming_goes_on_with_rows_and_lines(tmp_path, arguments):
    core = StandInCore()
    run_with(core, arguments)
    whole = (tmp_path / "run" / "metrics.jsonl").read_text()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "torn')
    again = StandInCore(resume=core.states[0])
    run_with(again, arguments)
    assert again.rows == core.rows[1:]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == whole
    fresh = StandInCore()
    run_with(fresh, [*arguments, "trainer.resume_mode=disable"])
    assert fresh.rows == core.rows
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == whole
    assert (tmp_path / "run" / "metrics.previous.jsonl").read_text() == whole


def test_resuming_with_another_batch_size_keeps_the_lines_of_the_steps_done(tmp_path, arguments):
    core = StandInCore()
    run_with(core, arguments)
    again = StandInCore(resume=core.states[1])
    half = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    run_with(again, [*arguments, *half])
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_resuming_a_run_that_refills_keeps_the_lines_of_the_steps_done(tmp_path, arguments):
    core = StandInCore(refills=True)
    run_with(core, arguments)
    again = StandInCore(resume=core.states[0], refills=True)
    run_with(again, arguments)
    assert again.rows == core.rows[1:]
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_what_fails_before_the_first_step_is_the_users_mistake(arguments):
    with pytest.raises(UserError, match=r"model\.safetensors: wanted 10 bytes, got 3"):
        run_with(StandInCore(fail="load"), arguments)


def test_what_fails_later_is_a_failure_with_a_report(tmp_path, arguments, train_file):
    argv = [*arguments, f"data.val_files={train_file}"]
    with pytest.raises(RunError, match="could not be scored"):
        run_with(StandInCore(fail="step"), argv)
    assert "ended before its last step" in (tmp_path / "run" / "report.html").read_text()


def test_a_failing_reward_function_is_said_once_with_its_reason(tmp_path, arguments, capsys):
    (tmp_path / "reward.py").write_text(
        "def compute_score(**kwargs):\n    raise KeyError('no answer')\n"
    )
    core = StandInCore()
    run_with(core, [*arguments, f"reward.custom_reward_function.path={tmp_path / 'reward.py'}"])
    assert all(score["failed"] for scores in core.scores for score in scores)
    assert len(core.scores[0]) == 8
    assert "8 samples left out" in capsys.readouterr().out


def test_a_data_source_without_scorer_is_refused_before_the_core_starts(tmp_path, arguments):
    write_jsonl(tmp_path / "train.jsonl", [data_row(data_source="nobody/knows")] * 4)
    core = StandInCore()
    with pytest.raises(UserError, match="nobody/knows"):
        run_with(core, arguments)
    assert core.config == {}


def test_a_reward_model_scores_by_itself_or_through_the_users_function(
    tmp_path, arguments, model_dir
):
    write_jsonl(tmp_path / "train.jsonl", [data_row(data_source="nobody/knows")] * 4)
    switched_on = [
        *arguments,
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={model_dir}",
        "trainer.total_training_steps=1",
    ]
    core = StandInCore(numbers=(0.25, -1.5))
    run_with(core, switched_on)
    assert [score["value"] for score in core.scores[0]] == [0.25, -1.5] * 4
    (tmp_path / "own.py").write_text(
        "def compute_score(extra_info, **kwargs):\n"
        "    return 2 * extra_info['rollout_reward_scores']['reward_model']\n"
    )
    core = StandInCore(numbers=(0.25, -1.5))
    run_with(core, [*switched_on, f"reward.custom_reward_function.path={tmp_path / 'own.py'}"])
    assert [score["value"] for score in core.scores[0]] == [0.5, -3.0] * 4


def test_a_reward_model_with_another_tokenizer_reads_the_conversation(
    tmp_path, arguments, model_dir
):
    other = shutil.copytree(model_dir, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = tokenizer.get("added_tokens", [])[1:]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    switched_on = [
        *arguments,
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={other}",
    ]
    inputs = run_inputs.load(resolve(switched_on, environ={}))
    prompt = inputs.train.prompts[0]
    item = {"prompt": prompt.tokens, "response": inputs.chat.encode("#### 5")}
    text = inputs.chat.decode(inputs.reward_text.tokens(prompt.messages, item))
    assert prompt.text in text
    assert text.rstrip().endswith("#### 5")
    (other / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json: no such file"):
        run_inputs.load(resolve(switched_on, environ={}))


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("critic.model.path=nowhere", "critic.model.path: wanted a local model"),
        ("reward.reward_model.enable=true", "reward.reward_model.model_path: wanted a directory"),
        ("actor_rollout_ref.model.path=nowhere", "wanted a local model directory, got nowhere"),
        ("data.train_files=nowhere.parquet", "nowhere.parquet: no such file"),
        ("reward.custom_reward_function.path=nowhere.py", "wanted a file, got nowhere.py"),
        (
            "data.train_batch_size=12",
            "data.train_batch_size: wanted at most 8, the usable training rows, got 12",
        ),
        (
            "actor_rollout_ref.ref.model.path=nowhere",
            "actor_rollout_ref.ref.model.path: wanted a local model",
        ),
    ],
)
def test_missing_inputs_are_named_before_a_model_loads(arguments, argument, text):
    with pytest.raises(UserError, match=text):
        run_inputs.load(resolve([*arguments, argument], environ={}))


def test_without_validation_data_the_core_validates_nothing(arguments):
    config = resolve([*arguments, "trainer.test_freq=2"], environ={})
    tree = json.loads(run_inputs.core_config(config, run_inputs.load(config)))
    assert tree["trainer"]["val_before_train"] is False
    assert tree["trainer"]["test_freq"] == -1


def test_the_first_interrupt_asks_to_stop():
    said = []
    before = signal.getsignal(
        signal.SIGINT
    )  # ignored, where a shell started the tests in the background
    with Interrupt(said.append) as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while not interrupt.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        assert interrupt.asked
    assert len(said) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_interrupt_stops_at_once():
    pid = os.fork()
    if pid == 0:
        with Interrupt(lambda line: None) as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            while not interrupt.asked:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
