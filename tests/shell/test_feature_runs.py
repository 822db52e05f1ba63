"""A user's features in whole runs of the command: GRPO of two steps on a tiny random model, SFT, and their mistakes."""

from __future__ import annotations

import importlib.util
import json

import pytest
from banyan.cli.main import main
from banyan.log.jsonl import by_step, read
from shell_files import ROOT, write_jsonl, write_tiny_llama

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("banyan._C") is None,
    reason="the extension banyan._C is not built (make build)",
)
EXAMPLE = f"banyan.feature.modules=[{ROOT / 'examples/features.py'}]"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def argv(tmp_path, tiny):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(map(ord, solution_str)) % 7 / 7\n"
    )
    return [
        "train",
        f"actor_rollout_ref.model.path={tiny}",
        "data.train_files='arithmetic:train?rows=40&seed=1'",
        "data.train_batch_size=4",
        "data.max_prompt_length=640",
        "data.max_response_length=6",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.sharing.mode=on",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=2",
        "trainer.logger=[console]",
    ]


def steps_of(argv, directory, *changes) -> list[dict]:
    assert main([*argv, f"trainer.default_local_dir={directory}", *changes]) == 0
    steps = by_step(read(directory / "metrics.jsonl"))
    return [steps[step] for step in sorted(steps)]


FIGURES = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean")


def test_grpo_under_features_and_after_them(tmp_path, argv, capsys):
    """In fp32: a swiglu in PyTorch gives the losses of the built-in one; without it the bits are as before."""
    argv = [*argv, "actor_rollout_ref.rollout.dtype=float32"]
    before = steps_of(argv, tmp_path / "before")
    capsys.readouterr()
    under = steps_of(argv, tmp_path / "under", EXAMPLE)
    said = capsys.readouterr().out
    assert "slot swiglu: swish-glu (the rollout runs op by op" in said
    assert "slot rms_norm: original <- count-norms/counted" in said
    after = steps_of(argv, tmp_path / "after")
    for one, other, plain in zip(before, under, after, strict=True):
        for name in FIGURES:
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
            assert plain[name] == one[name], name
        assert other["actor/grad_norm"] > 0
        assert other["training/rollout_probs_diff_max"] < 1e-4


def test_another_activation_is_rolled_out_scored_and_trained_in_bf16(tmp_path, argv):
    own = steps_of(argv, tmp_path / "own")
    got = steps_of(argv, tmp_path / "other", EXAMPLE, "banyan.feature.args.swiglu_beta=3.0")
    for one, other in zip(own, got, strict=True):
        assert one["training/rollout_probs_diff_max"] == 0
        assert other["training/rollout_probs_diff_max"] < 0.02
        assert other["actor/grad_norm"] > 0
    assert got[0]["actor/entropy"] != own[0]["actor/entropy"]


def test_sft_under_a_feature(tmp_path, tiny):
    rows = [{"prompt": f"{i} + 3?", "response": str(i + 3)} for i in range(8)]
    argv = [
        "sft",
        f"model.path={tiny}",
        f"data.train_files={write_jsonl(tmp_path / 'rows.jsonl', rows)}",
        "data.prompt_key=prompt",
        "data.response_key=response",
        "data.train_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.logger=[console]",
    ]
    own = steps_of(argv, tmp_path / "own")[-1]
    got = steps_of(argv, tmp_path / "other", EXAMPLE, "banyan.feature.args.swiglu_beta=3.0")[-1]
    again = steps_of(argv, tmp_path / "again")[-1]
    assert got["train/loss"] != own["train/loss"]
    assert again["train/loss"] == own["train/loss"]
    assert again["train/grad_norm"] == own["train/grad_norm"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            [EXAMPLE, "banyan.feature.args.swiglu_beta=-1"],
            "swiglu_beta: wanted > 0, got -1.0",
        ),
        (
            [EXAMPLE, "banyan.feature.args.swiglu_bta=1"],
            "got 'swiglu_bta'; the nearest is swiglu_beta",
        ),
        (["banyan.feature.modules=[none.py]"], "got none.py: no such file"),
        (
            [
                EXAMPLE,
                "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:9]",
                "actor_rollout_ref.rollout.name=vllm",
            ],
            "wanted none with changed slots (rms_norm: original <- count-norms/counted; swiglu: swish-glu)",
        ),
    ],
)
def test_mistakes_are_the_users(tmp_path, argv, capsys, changes, text):
    assert main([*argv, f"trainer.default_local_dir={tmp_path / 'run'}", *changes]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_an_op_that_fails_ends_the_run_with_its_line(tmp_path, argv, capsys):
    path = tmp_path / "bad.py"
    path.write_text(
        "from banyan import feature\n"
        "class Bad(feature.Feature):\n"
        "    def register_patches(self, slots, args):\n"
        "        slots.replace('swiglu', forward)\n"
        "def forward(gate_up):\n"
        "    return gate_up.no_such_thing\n"
        "feature.register(Bad)\n"
    )
    changes = [f"banyan.feature.modules=[{path}]", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main([*argv, *changes]) == 1
    error = capsys.readouterr().err
    assert "feature bad: swiglu: forward failed: AttributeError" in error
    assert "(line 6)" in error
    from banyan import _C

    assert _C.slots.dump() == []


def test_the_list_shows_features_of_a_file(capsys):
    assert main(["features", "--json", EXAMPLE, "banyan.feature.args.swiglu_beta=2"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["swish-glu"]["switches"] == {"banyan.feature.args.swiglu_beta": 2.0}
    assert rows["count-norms"]["level"] == 1


def test_an_engine_forgets_the_keys_of_other_ops(tiny):
    """One engine, the same prompt under the original, another activation, and the original again."""
    import torch

    from banyan import _C, feature

    model = _C.Model.load(str(tiny), "fp32")
    prompt = list(range(5, 200))

    def logprobs(engine) -> list[float]:
        params = {"max_tokens": 6, "seed": 3, "temperature": 0.0, "ignore_eos": True}
        found: list[dict] = []
        engine.generate([{"row": 0, "tokens": prompt, "n": 1}], params, found.append)
        return list(found[0]["rollout_log_probs"])

    def halved(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return 0.5 * torch.nn.functional.silu(gate) * up

    class Halved(feature.Feature):
        def register_patches(self, slots, args):
            slots.replace("swiglu", halved)

    used = _C.Engine(model, {"kv_bytes": 2**24})
    before = logprobs(used)
    with feature.applied(Halved):
        under = logprobs(used)
        assert under == logprobs(_C.Engine(model, {"kv_bytes": 2**24}))
    assert under != before
    assert logprobs(used) == before


def test_a_trained_activation_is_scored_and_generated_with(tmp_path, tiny, capsys):
    example = ["--feature", str(ROOT / "examples/features.py")]
    source = write_jsonl(tmp_path / "rows.jsonl", [{"id": 1, "input_ids": [5, 6, 7, 8]}])

    def scored(*options: str) -> str:
        out = tmp_path / "out.jsonl"
        argv = ["score", "--model", str(tiny), "--in", str(source), "--out", str(out)]
        assert main([*argv, "--dtype", "fp32", *options]) == 0
        return out.read_text()

    own = scored()
    assert scored(*example, "--feature-arg", "swiglu_beta=3") != own
    assert scored() == own, "in force until the command ends"
    argv = ["score", "--model", str(tiny), "--in", str(source), "--out", str(tmp_path / "o.jsonl")]
    for options, text in (
        ([*example, "--feature-arg", "swiglu_beta"], "--feature-arg: wanted NAME=VALUE"),
        ([*example, "--feature-arg", "beta=1"], "(swiglu_beta), got 'beta'"),
        (["--feature", "none.py"], "got none.py: no such file"),
    ):
        assert main([*argv, *options]) == 2
        assert text in capsys.readouterr().err
