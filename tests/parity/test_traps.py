"""The limits and traps of prefix-0501 (specification B8), a test each: banyan does not have it.

Its other rows have their tests in C++: trie/sharing_detect_test.cpp (first inserter), train/sharing_log_test.cpp and
sharing_observer_test.cpp (audit fields, missing providers, lines per layer).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys

import oracle
import pytest
import torch
from banyan.config.resolve import resolve
from banyan.errors import UserError
from models import random_samples, write_model
from test_gradients import compare, config_json, random_batch

import banyan.ops
import banyan.trie
from banyan import _C

ACTOR = "actor_rollout_ref.actor"
BASE = [
    "actor_rollout_ref.model.path=model",
    "data.train_files=train.parquet",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=5",
]


def carried(policy: str, tokens: int) -> dict:
    """Keys of a run that cuts its tries at `tokens` and carries gradients across the cuts."""
    return {
        "actor_rollout_ref__sharing__mode": "on",
        "actor_rollout_ref__sharing__carry": policy,
        "actor_rollout_ref__sharing__max_tokens_per_block": tokens,
    }


def longest_path(trajectories) -> int:
    return max(len(t["prompt"]) + len(t["response"]) for t in trajectories)


def test_row_01_cuts_lose_sharing(tmp_path):
    """There, sharing ends at the micro-batch. Here a cut batch computes each unique token once."""
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(2, "two_levels")
    result = compare(
        path,
        "fp64",
        trajectories,
        advantages,
        1e-10,
        **carried("recompute", longest_path(trajectories)),
    )
    assert result["num_blocks"] > 1
    assert result["computed_tokens"] == result["unique_tokens"] < result["logical_tokens"]


def test_row_02_first_rows_of_a_large_group_unshared():
    """There, min_group_size=N leaves the first N - 1 rows alone, and a deep match never retreats to a shallower one."""
    rows = [[1, 2, 3, 10], [1, 2, 3, 20], [1, 2, 3, 30], [1, 2, 9, 40]]
    packed = banyan.trie.pack(rows, min_group_size=3)
    # 1 2 shared by four and 3 by three; the last row keeps 9 40.
    assert packed.num_unique == 3 + 3 + 2
    assert [packed.path(i)[2].item() for i in range(3)] == [packed.path(0)[2].item()] * 3


def test_row_02_order_of_the_rows():
    """There, the first row in batch order provides. Here every order packs to the same arrays."""
    samples = random_samples(3, 131)
    want = banyan.trie.pack(samples)
    for seed in range(5):
        order = list(range(len(samples)))
        random.Random(seed).shuffle(order)
        packed = banyan.trie.pack([samples[i] for i in order])
        for name in ("tokens", "positions", "parent", "depth", "tout", "segments"):
            assert torch.equal(getattr(packed, name), getattr(want, name)), name
        assert [packed.path(order.index(i)).tolist() for i in range(len(samples))] == [
            want.path(i).tolist() for i in range(len(samples))
        ]


def test_row_03_keys_copied_into_every_reuser(tmp_path):
    """There, each reuser holds a copy of its prefix to the end of the pass, so memory does not fall with sharing."""
    _, path = write_model("llama", tmp_path)
    draw = random.Random(1)
    prompt = [draw.randrange(1, 131) for _ in range(200)]
    trajectories = [
        {
            "row": 0,
            "index": i,
            "prompt": prompt,
            "response": [i + 1] + [draw.randrange(1, 131) for _ in range(19)],
            "response_mask": [1] * 20,
        }
        for i in range(8)
    ]
    results = {}
    for mode in ("on", "off"):
        model = _C.Model.load(str(path), "fp32", with_backward=True)
        text = config_json(actor_rollout_ref__sharing__mode=mode)
        results[mode] = _C.accumulate_gradients(model, text, trajectories, [1.0, -1.0] * 4)
    on, off = results["on"], results["off"]
    assert (on["unique_tokens"], off["computed_tokens"]) == (360, 1760)
    share = on["peak_activation_bytes"] / off["peak_activation_bytes"]
    assert share <= 1.02 * on["unique_tokens"] / off["computed_tokens"]
    assert on["peak_carry_bytes"] == 0


def test_row_04_one_clone_of_the_logits_per_reuser():
    """There, [1, V] logits are cloned per reuser and columns restored in [B, L] buffers. Here one row per source."""
    prompt = list(range(1, 30))
    packed = banyan.trie.pack(
        [[*prompt, 40 + i, 50 + i] for i in range(8)],
        scored=[[0] * len(prompt) + [1, 1] for _ in range(8)],
    )
    # The last prompt token serves the first response token of all eight, then one row for each second token.
    assert len(packed.edges.source) == 1 + 8
    assert len(packed.edges.token) == 8 + 8
    assert packed.edges.source[0] == packed.path(0)[len(prompt) - 1]


def test_row_05_every_row_padded_to_the_alignment(tmp_path):
    """There, every trimmed row is padded. Here what runs is the unique tokens and nothing else."""
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(4, "one_token")
    result = compare(path, "fp64", trajectories, advantages, 1e-10)
    samples = {tuple(t["prompt"] + t["response"]) for t in trajectories}
    prefixes = {sample[: n + 1] for sample in samples for n in range(len(sample))}
    assert result["computed_tokens"] == len(prefixes)


@pytest.mark.parametrize("policy", ["retain", "recompute", "replay", "auto"])
def test_row_06_wrong_gradients_under_recompute(policy, tmp_path):
    """There, a layer recomputed in the backward runs unshared on trimmed rows: wrong gradients, no error."""
    _, path = write_model("qwen3", tmp_path)
    trajectories, advantages = random_batch(9, "deep")
    result = compare(
        path,
        "fp64",
        trajectories,
        advantages,
        1e-10,
        **carried(policy, longest_path(trajectories)),
    )
    assert result["num_blocks"] > 1
    assert (result["recomputed_tokens"] > 0) or policy != "recompute"


@pytest.mark.parametrize(
    "place",
    [
        f"{ACTOR}.prefix_sharing_config",
        f"{ACTOR}.megatron.prefix_sharing_config",
        f"{ACTOR}.megatron.override_transformer_config.prefix_sharing_config",
    ],
)
@pytest.mark.parametrize(
    ("key", "value"),
    [("detector", "prompt"), ("model_type", "vlm"), ("supported_cp_size", "2")],
)
def test_row_07_two_validators_of_which_one_checks_less(place, key, value):
    """There, the engine's form checks neither context parallelism, fusion nor multimodality. Here both are one."""
    with pytest.raises(UserError, match=r"detector|model_type|context_parallel_size"):
        resolve(
            [
                *BASE,
                f"+{place}.enable_prefix_sharing=true",
                f"+{place}.integrate_mode=verl_megatron_actor",
                f"+{place}.{key}={value}",
            ],
            environ={},
        )


def test_row_07_unshared_in_silence():
    """There, a batch without mask comes back unshared and nothing says so. Here a switch that is off is said."""
    notes = resolve([*BASE, f"+{ACTOR}.prefix_sharing_config=false"], environ={}).notes
    assert any("sharing.mode=off: switched off by enable_prefix_sharing" in note for note in notes)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("attn_output_gate", True, "output gate"),  # row 8: attention without its gate
        ("model_type", "qwen3_next", "wanted one of"),  # row 9: a toy in place of the delta rule
        ("model_type", "qwen2_vl", "wanted one of"),  # row 10: pictures
        ("attention_dropout", 0.1, "wanted 0"),  # noise that sharing would change
    ],
)
def test_rows_08_to_10_layers_that_are_not_there_are_refused(key, value, text, tmp_path):
    _, path = write_model("qwen3", tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises((ValueError, OSError), match=text):
        _C.Model.load(str(path), "fp32")


def test_row_10_fused_head_and_fused_rope():
    """There, both are refused beside sharing. Here the head is always fused and the keys are taken."""
    override = f"{ACTOR}.megatron.override_transformer_config"
    config = resolve(
        [
            *BASE,
            "actor_rollout_ref.model.use_fused_kernels=true",
            f"+{override}.apply_rope_fusion=true",
            f"+{override}.fused_single_qkv_rope=true",
        ],
        environ={"ENABLE_PREFIX_SHARING": "1"},
    )
    assert config["actor_rollout_ref.sharing.mode"] == "on"


def test_row_11_statistics_count_physical_tokens(tmp_path):
    """There, load statistics count a shared token once. Here every normaliser counts logical tokens."""
    _, path = write_model("llama", tmp_path)
    trajectories, advantages = random_batch(5, "duplicates")
    for mode in ("token-mean", "seq-mean-token-mean"):
        result = compare(
            path,
            "fp64",
            trajectories,
            advantages,
            1e-10,
            actor_rollout_ref__actor__loss_agg_mode=mode,
        )
        assert result["logical_tokens"] == sum(
            len(t["prompt"]) + len(t["response"]) for t in trajectories
        )


@pytest.mark.parametrize("name", ["llama3_rope", "yarn_rope", "linear_rope"])
def test_row_12_rope_extended_from_two_rows(name, tmp_path):
    """There, rows of the table behind the trimmed length are extrapolated. Here the model's rule makes each."""
    model, path = write_model(name, tmp_path)
    draw = random.Random(0)
    prompt = [draw.randrange(1, 131) for _ in range(150)]
    samples = [prompt + [draw.randrange(1, 131) for _ in range(30 * (i + 1))] for i in range(3)]
    ours = _C.score(_C.Model.load(str(path), "fp32"), samples)["logprobs"]
    for sample, got in zip(samples, ours, strict=True):
        ids = torch.tensor(sample)
        with torch.no_grad():
            table = model(ids[None]).logits[0, :-1].log_softmax(-1)
        want = table.gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(got, want, atol=5e-5, rtol=0)


def test_row_13_columns_rebuilt_by_copies(tmp_path):
    """There, log-probabilities and entropies of a reuser are copied columns. Here each is its own edge's."""
    _, path = write_model("qwen2", tmp_path)
    model = _C.Model.load(str(path), "fp64")
    weights = {key: value.double() for key, value in model.params().items()}
    config = json.loads((path / "config.json").read_text())
    samples = random_samples(1, 131)
    scores = _C.score(model, samples, True, 0.7)
    log_probs, entropies = oracle.log_probs(weights, config, samples, 0.7)
    for index in range(len(samples)):
        for name, want in (("logprobs", log_probs), ("entropy", entropies)):
            torch.testing.assert_close(scores[name][index], want[index], atol=1e-10, rtol=0)


@pytest.mark.parametrize("policy", ["retain", "recompute"])
def test_row_13_no_critic(policy, tmp_path):
    """There, only the actor shares. Here values lie on nodes of the same trie, cut and carried like the actor's."""
    _, path = write_model("llama", tmp_path)
    trajectories, _ = random_batch(9, "deep")
    draw = torch.Generator().manual_seed(0)
    counts = [sum(t["response_mask"]) for t in trajectories]
    values, returns = (
        [torch.randn(n, generator=draw, dtype=torch.float64) for n in counts] for _ in range(2)
    )
    runs = []
    for keys in ({"actor_rollout_ref__sharing__mode": "off"}, carried(policy, 65)):
        model = _C.Model.load(str(path), "fp64", with_backward=True, head="value")
        text = config_json(algorithm__adv_estimator="gae", **keys)
        result = _C.accumulate_value_gradients(model, text, trajectories, values, returns)
        runs.append((result["loss"], model.grads()))
    (loss, dense), (shared_loss, shared) = runs
    assert shared_loss == pytest.approx(loss, rel=1e-12)
    for name, want in dense.items():
        assert want.norm() > 0, name
        assert (shared[name] - want).norm() <= 1e-10 * want.norm(), name


def test_row_16_patching_of_other_frameworks():
    """There, importing the package rewrites verl and Megatron. Here nothing of another package changes."""
    code = (
        "import transformers.models.llama.modeling_llama as llama\n"
        "before = {k: id(v) for k, v in vars(llama).items()}\n"
        "import sys, banyan, banyan.trainer.main_ppo, banyan.config.resolve\n"
        "assert {k: id(v) for k, v in vars(llama).items()} == before\n"
        "assert not {'verl', 'megatron', 'mindspeed'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
