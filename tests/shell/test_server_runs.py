"""Training runs whose tokens come from a server: the scripted one, behind which the run's own weights generate."""

from __future__ import annotations

import importlib.util
import threading
from contextlib import nullcontext

import pytest
from banyan.cli.main import main
from banyan.log.jsonl import by_step, read
from banyan.trainer.host import Host
from scripted_server import Answered, Partial, ScriptedServer
from shell_files import write_tiny_llama

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
SEED = 42  # rollout.seed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def argv(tmp_path, tiny):
    (tmp_path / "reward.py").write_text(
        "import hashlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return hashlib.sha256(solution_str.encode()).digest()[0] / 255\n"
    )
    return [
        "train",
        f"actor_rollout_ref.model.path={tiny}",
        "data.train_files='arithmetic:train?rows=40&seed=1'",
        "data.train_batch_size=2",
        "data.max_prompt_length=640",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=3",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.logger=[console]",
    ]


class CoreLaw:
    """Generates with the core from the weights that were loaded last, with the noise of the built-in engine."""

    def __init__(self, directory, learns=True):
        from banyan import extension

        self.core = extension.load()
        self.learns = learns
        self.lock = threading.Lock()
        self.prompts = {}  # by response: the first prompt
        self.loaded = []
        self.load(directory)

    def load(self, directory):
        if self.loaded and not self.learns:
            return
        self.loaded.append(str(directory))
        self.model = self.core.Model.load(str(directory), dtype="bf16")
        self.engine = self.core.Engine(self.model, {"kv_bytes": 2**24})

    def __call__(self, prompt, budget, seed, name):
        parts = name.split("-")
        probes = parts[1] == "probe"
        step, row, index = (0, 0, 0) if probes else map(int, parts[2:5])
        with self.lock:
            key = (probes, step, row, index)
            first = prompt if probes or parts[5] == "1" else self.prompts[key]
            self.prompts[key] = first
            done = len(prompt) - len(first)
            params = {
                "temperature": 1.0,
                "max_tokens": budget + done,
                "eos_ids": [] if probes else [257],
                "ignore_eos": probes,
                "seed": SEED,
                "step": step,
            }
            found = []
            rows = [{"row": row, "tokens": first, "n": index + 1}]
            self.engine.generate(rows, params, found.append)
        one = next(item for item in found if item["index"] == index)
        assert one["response"][:done] == prompt[len(first) :]
        return one["response"][done:], one["rollout_log_probs"][done:]


def numbers(directory):
    measured = ("timing", "perf/", "actor/perf/")
    steps = by_step(read(directory / "metrics.jsonl"))
    return {
        step: {k: v for k, v in m.items() if not k.startswith(measured)}
        for step, m in steps.items()
    }


def at(directory):
    return f"trainer.default_local_dir={directory}"


def through(server, *more):
    return [
        f"actor_rollout_ref.rollout.name={server.dialect}",
        f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
        *more,
    ]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_with_the_same_tokens_gives_the_same_gradients(
    dialect, tmp_path, argv, tiny, monkeypatch
):
    assert main([*argv, at(tmp_path / "own")]) == 0
    law = CoreLaw(tiny)
    seen = []
    submit = Host.submit

    def watched(host, trajectory, validation):
        seen.append((len(trajectory["response"]), trajectory["weight_spans"]))
        return submit(host, trajectory, validation)

    monkeypatch.setattr(Host, "submit", watched)
    with ScriptedServer(dialect, law=law, load=law.load, policy="lpm") as server:
        server.faults["tokens"] = [None, Partial(3), None, Partial(0)]
        assert main([*argv, at(tmp_path / "theirs"), *through(server)]) == 0
        assert not server.state["paused"]
    versions = [spans[0]["version"] for _, spans in seen]
    assert versions == ["0"] * 6 + ["1"] * 6
    for length, spans in seen:
        number = int(spans[0]["version"])
        assert spans == [{"epoch": number, "version": str(number), "start": 0, "end": length}]
    own, theirs = numbers(tmp_path / "own"), numbers(tmp_path / "theirs")
    assert sorted(own) == [1, 2]
    for step in (1, 2):
        assert theirs[step]["actor/grad_norm"] == own[step]["actor/grad_norm"] > 0
        assert theirs[step]["training/rollout_probs_diff_max"] == 0.0
        for metrics in (own[step], theirs[step]):  # what the server cached is its own affair
            metrics.pop("rollout/computed_prompt_tokens")
    assert own == theirs
    assert (
        len(set(law.loaded)) == len(law.loaded) == 3
    )  # as started, before the first step, after it
    assert not list((tmp_path / "theirs" / "rollout_weights").iterdir())


def test_what_a_server_leaves_unfinished_goes_on_in_the_next_step(tmp_path, argv, tiny):
    law = CoreLaw(tiny)
    rows = []
    next_step = threading.Event()

    def slow_for_the_third_row(prompt, budget, seed, name):
        *_, step, row, _, _ = name.split("-") if "probe" not in name else [0] * 6
        if row not in rows:
            rows.append(row)
        if step == "1" and rows.index(row) == 3:  # after the probe's
            next_step.wait(60)
        if step == "2":
            next_step.set()
        return law(prompt, budget, seed, name)

    with ScriptedServer("vllm", law=slow_for_the_third_row, load=law.load) as server:
        more = [
            "actor_rollout_ref.rollout.over_sample_rate=0.3",
            "banyan.partial_rollout=true",
            "actor_rollout_ref.rollout.server.timeout=4",
            "banyan.rollout.request_timeout=60",
        ]
        assert main([*argv, at(tmp_path / "run"), *through(server, *more)]) == 0
    found = numbers(tmp_path / "run")
    assert found[1]["rollout/cut_groups"] == 1
    assert found[2]["rollout/resumed_responses"] >= 1
    assert found[2]["actor/grad_norm"] > 0


def test_a_server_that_misses_an_update_stops_the_run(tmp_path, argv, tiny, capsys):
    law = CoreLaw(tiny, learns=False)
    with ScriptedServer("vllm", law=law, load=law.load) as server:
        assert main([*argv, at(tmp_path / "run"), *through(server)]) == 1
    assert "exactly those from before the update" in capsys.readouterr().err
    assert sorted(numbers(tmp_path / "run")) == [1]


def test_wrong_log_probabilities_stop_the_run_before_the_first_step(tmp_path, argv, tiny, capsys):
    law = CoreLaw(tiny)

    def wrong(*args):
        ids, logprobs = law(*args)
        return ids, [value - 1.0 for value in logprobs]

    with ScriptedServer("vllm", law=wrong, load=law.load) as server:
        assert main([*argv, at(tmp_path / "run"), *through(server)]) == 1
    err = capsys.readouterr().err
    assert "probe of weights 0: wanted log-probabilities within 0.2 of the trainer's" in err
    assert "got 1.0" in err


def test_a_refusal_of_the_server_reaches_the_user(tmp_path, argv, tiny, capsys):
    law = CoreLaw(tiny)
    with ScriptedServer("sglang", law=law, load=law.load, policy="lpm") as server:
        server.faults["/generate"] = [None, Answered(400, '{"error": {"message": "too long"}}')]
        assert main([*argv, at(tmp_path / "run"), *through(server)]) == 1
    captured = capsys.readouterr()
    assert (
        f"banyan train: POST {server.url}/generate: wanted 200, got 400: too long" in captured.err
    )
    assert "Traceback" not in captured.err


class Careless:
    """A generator in Python that gives wrong answers."""

    def __init__(self, answers):
        self.answers = answers  # indices that it answers with

    def attach(self, save, score):
        self.save = save

    def detach(self):
        pass

    def weights_changed(self, version):
        pass

    def generate(self, prompts, params, on_finished, should_stop):
        for prompt in prompts:
            for index in self.answers:
                on_finished(
                    {
                        "row": prompt["row"],
                        "index": index,
                        "prompt": prompt["tokens"],
                        "response": [65, 66],
                        "rollout_log_probs": [-1.0] * (2 if index < 2 else 1),
                    }
                )
        return {}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([0, 1], "wanted every response, got none for index 2 of row"),
        ([0, 0], "wanted one that is still to come"),
        ([0, 1, 2], "wanted one log-probability per token (2), got 1"),
    ],
)
def test_a_generator_that_errs_is_told_what_was_wanted(
    answers, said, tmp_path, argv, capsys, monkeypatch
):
    from banyan.drivers import connect

    generator = Careless(answers)
    monkeypatch.setattr(connect, "generator", lambda config, say: nullcontext(generator))
    with ScriptedServer("vllm") as server:
        assert main([*argv, at(tmp_path / "run"), *through(server)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("banyan train: [generator] ")
    assert said in err
    with pytest.raises(ValueError, match="the run has ended, and its actor with it"):
        generator.save(str(tmp_path / "late"), "", "bf16")


def test_a_key_file_that_is_missing_is_the_users_mistake(tmp_path, argv, tiny, capsys):
    with ScriptedServer("vllm") as server:
        more = f"banyan.rollout.api_key_file={tmp_path / 'none'}"
        assert main([*argv, at(tmp_path / "run"), *through(server, more)]) == 2
    assert "banyan.rollout.api_key_file: wanted a readable file" in capsys.readouterr().err
