"""A loss and an advantage as Python functions: loading them, what they get, what is said when they are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from banyan.algo_functions import ADVANTAGE_KEY, LOSS_KEY
from banyan.config.checks import ALONE
from banyan.config.resolve import resolve
from banyan.errors import RunError, UserError

from banyan import _C, algo_functions

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/algorithms.py"


def names(loss: str = "vanilla", advantage: str = "grpo") -> dict[str, str]:
    """What the loader reads of a configuration."""
    return {LOSS_KEY: loss, ADVANTAGE_KEY: advantage}


def register(loss: str = "vanilla", advantage: str = "grpo") -> None:
    config = names(loss, advantage)
    algo_functions.register(_C, config, algo_functions.load(config))


def write(directory: Path, text: str) -> str:
    path = directory / "mine.py"
    path.write_text(text)
    return str(path)


def two_tokens(**more) -> dict:
    return {
        "log_prob": torch.tensor([-1.0, -2.0], dtype=torch.float64),
        "old_log_prob": torch.tensor([-1.2, -1.9], dtype=torch.float64),
        "advantage": torch.tensor([2.0, -1.0], dtype=torch.float64),
        "mask": torch.ones(2, dtype=torch.float64),
        "offsets": [0, 2],
        **more,
    }


REWARDS = {"group": [0, 0, 0], "score": [1.0, 0.0, 0.5], "token_reward": [[0, 1.0], [0.0], [0.5]]}


def test_built_in_names_load_nothing():
    assert algo_functions.load(names()) == {}


def test_the_example_loss_and_its_gradient():
    name = f"{EXAMPLE}:soft_clip"
    register(loss=name)
    got = _C.policy_loss(name, two_tokens(), {"clip_ratio_high": 0.2})
    log_prob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ratio = (log_prob - torch.tensor([-1.2, -1.9], dtype=torch.float64)).exp()
    bounded = 1 + 0.2 * torch.tanh((ratio - 1) / 0.2)
    want = (-torch.tensor([2.0, -1.0], dtype=torch.float64) * bounded).mean()  # token-mean
    want.backward()
    assert got["loss"] == pytest.approx(want.item(), rel=1e-14)
    assert (got["grad_log_prob"] - log_prob.grad).abs().max() < 1e-15
    assert got["extra"] == {"ratio_max": pytest.approx(ratio.max().item())}


def test_the_example_advantage():
    name = f"{EXAMPLE}:median_baseline"
    register(advantage=name)
    got = _C.advantages(name, REWARDS)
    assert got["advantage"] == [[0.5, 0.5], [-0.5], [0.0]]
    assert got["returns"] == got["advantage"]


def test_advantages_per_token_with_returns(tmp_path):
    path = write(
        tmp_path,
        "def to_go(token_level_rewards, values, old_log_probs, config):\n"
        "    assert values is None and old_log_probs is None and config['gamma'] == 0.5\n"
        "    returns = [row.flip(0).cumsum(0).flip(0) for row in token_level_rewards]\n"
        "    return [row - 1 for row in returns], returns\n",
    )
    register(advantage=f"{path}:to_go")
    got = _C.advantages(f"{path}:to_go", REWARDS, {"gamma": 0.5})
    assert got["advantage"] == [[0.0, 0.0], [-1.0], [-0.5]]
    assert got["returns"] == [[1.0, 1.0], [0.0], [0.5]]


def test_a_loss_gets_all_that_it_names_and_applies_weights_itself(tmp_path):
    path = write(
        tmp_path,
        "def weighted(log_prob, weights, offsets, response_mask, entropy, ref_log_prob, **rest):\n"
        "    assert offsets == [0, 2] and entropy is None and ref_log_prob is None\n"
        "    assert set(rest) == {'old_log_prob', 'advantages', 'config'}\n"
        "    return -log_prob * weights\n"
        "def plain(log_prob):\n"
        "    return -log_prob\n",
    )
    weight = torch.tensor([0.5, 0.25], dtype=torch.float64)
    for function in ("weighted", "plain"):  # the core multiplies where the function does not
        register(loss=f"{path}:{function}")
        got = _C.policy_loss(f"{path}:{function}", two_tokens(weight=weight))
        assert got["loss"] == pytest.approx((1.0 * 0.5 + 2.0 * 0.25) / 2)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("missing.py:loss", "no such file: missing.py"),
        ("FILE:absent", "wanted a function absent"),
        ("FILE:constant", "wanted a function constant"),
        ("FILE:greedy", "wants rewards, fame; known arguments are log_prob"),
    ],
)
def test_what_cannot_be_loaded_is_named(name, wanted, tmp_path):
    path = write(tmp_path, "constant = 3\ndef greedy(log_prob, rewards, fame): pass\n")
    with pytest.raises(UserError, match=wanted) as caught:
        algo_functions.load(names(loss=name.replace("FILE", path)))
    assert str(caught.value).startswith(LOSS_KEY)


def test_a_file_that_fails_to_load_is_named(tmp_path):
    path = write(tmp_path, "\n1 / 0\n")
    with pytest.raises(UserError, match=r"cannot be loaded: ZeroDivisionError.*\(line 2\)"):
        algo_functions.load(names(loss=f"{path}:loss"))


@pytest.mark.parametrize(
    ("body", "error", "wanted"),
    [
        ("return log_prob[:1]", ValueError, r"wanted one loss per token.*\[2\], got \[1\]"),
        ("return log_prob.detach()", ValueError, "wanted a loss that depends on log_prob"),
        ("return log_prob * float('nan')", ValueError, "wanted finite numbers, got nan at token 0"),
        ("return 3.0", RunError, "TypeError: wanted a tensor with one loss per token, got float"),
        ("return log_prob / undefined", RunError, r"NameError: .*\(line 2\)"),
    ],
)
def test_wrong_losses_are_named(body, error, wanted, tmp_path):
    name = f"{write(tmp_path, f'def loss(log_prob):{chr(10)}    {body}')}:loss"
    register(loss=name)
    with pytest.raises(error, match=wanted) as caught:
        _C.policy_loss(name, two_tokens())
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("body", "error", "wanted"),
    [
        ("return [0.0]", ValueError, "wanted advantages of 3 responses, got 1"),
        (
            "return token_level_rewards[::-1]",
            ValueError,
            "wanted 2 advantages for response 0, got 1",
        ),
        ("return [float('inf')] * 3", ValueError, "wanted finite advantages, got inf"),
        ("return None", RunError, "TypeError"),
    ],
)
def test_wrong_advantages_are_named(body, error, wanted, tmp_path):
    name = f"{write(tmp_path, f'def adv(token_level_rewards):{chr(10)}    {body}')}:adv"
    register(advantage=name)
    with pytest.raises(error, match=wanted) as caught:
        _C.advantages(name, REWARDS)
    assert name in str(caught.value)


def test_a_relative_path_still_gives_the_line(tmp_path, monkeypatch):
    write(tmp_path, "def loss(log_prob):\n    x = 1\n    return x / 0\n")
    monkeypatch.chdir(tmp_path)
    register(loss="mine.py:loss")
    with pytest.raises(RunError, match=r"mine\.py:loss failed: ZeroDivisionError.*\(line 3\)"):
        _C.policy_loss("mine.py:loss", two_tokens())


def test_a_name_that_was_not_loaded_is_refused():
    with pytest.raises(ValueError, match=r"wanted a loaded function 'nobody\.py:loss', got none"):
        _C.policy_loss("nobody.py:loss", two_tokens())


def test_sequence_losses_refuse_another_aggregation():
    with pytest.raises(ValueError, match="wanted seq-mean-token-mean"):
        _C.policy_loss("gspo", two_tokens(), {"loss_agg_mode": "token-mean"})


def test_the_guide_shows_the_example():
    guide = (ROOT / "docs/guides/your_own_algorithm.md").read_text()
    blocks = [block.split("```")[0].strip() for block in guide.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        assert block in EXAMPLE.read_text()


@pytest.mark.parametrize("key", [LOSS_KEY, ADVANTAGE_KEY])
def test_the_command_line_takes_a_function(key):
    name = f"{EXAMPLE}:median_baseline"
    base = ["data.train_files=unused.jsonl", "actor_rollout_ref.model.path=unused"]
    base += ["actor_rollout_ref.rollout.n=4"]
    estimator = [] if key == ADVANTAGE_KEY else ["algorithm.adv_estimator=grpo"]
    config = resolve([*base, *estimator, f"{key}={name}"])
    assert config[key] == name


def test_the_shell_names_what_the_core_has():
    """The YAML lists the core's estimators and losses; the check of rollout.n knows which compare a group."""
    yaml = (ROOT / "python/banyan/conf/ppo_trainer.yaml").read_text()
    estimators = _C.advantage_estimators()
    for key, names in (("adv_estimator", estimators), ("loss_mode", _C.policy_losses())):
        listed = re.search(rf"^ *{key}: .* core one of (.*) or FILE", yaml, re.MULTILINE)[1]
        assert sorted(listed.split(", ")) == sorted(names)
    alone = [name for name, traits in estimators.items() if not traits["is_group_relative"]]
    assert sorted(alone) == sorted(ALONE)
