"""Features of a user on the real core: replaced and wrapped ops in scoring, gradients and whole steps."""

from __future__ import annotations

import importlib.util
import itertools
import json

import pytest
import torch
from banyan.errors import RunError, UserError
from conftest import ROOT
from models import random_samples, write_model
from test_step import run

from banyan import _C, feature

# fp64 against the original; fp32 arithmetic of a replacement in a bf16 run.
EXACT = 1e-9


def load_example():
    spec = importlib.util.spec_from_file_location("features_example", ROOT / "examples/features.py")
    module = importlib.util.module_from_spec(spec)
    with feature.registry.collecting():
        spec.loader.exec_module(module)
    return module


def one(patches) -> feature.Feature:
    """A feature with these patches."""
    return type("Mine", (feature.Feature,), {"register_patches": patches})()


@pytest.fixture(autouse=True)
def untouched():
    yield
    dump = _C.slots.dump()
    _C.slots.remove_all()
    _C.slots.apply()
    assert dump == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_model("llama", tmp_path_factory.mktemp("llama"))[1]


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    return write_model("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))[1]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return write_model("qwen3", tmp_path_factory.mktemp("qwen3"))[1]


# --- the ops of a decoder in plain PyTorch ---


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(dy, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * gate * s], dim=-1)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x, positions, cos, sin, sign=1.0):
    c, s = cos[positions.long(), None], sign * sin[positions.long(), None]
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


def rope_backward(dy, positions, cos, sin):
    return rope(dy, positions, cos, sin, sign=-1.0)


def linear(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


def linear_backward_weight(dy, x):
    return dy.T @ x, dy.sum(0)


def attention(q, k, v, parent, scale):
    mask = feature.ancestor_mask(parent, q.shape[0])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", p, v)


def cross_entropy(hidden, weight, row_offsets, token, temperature):
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    lse = (hidden @ weight.T / temperature).logsumexp(-1)
    rows = torch.repeat_interleave(torch.arange(len(hidden)), row_offsets.diff().long())
    return log_p[rows, token.long()], lse, -(log_p.exp() * log_p).sum(-1)


def embedding(ids, weight):
    return weight[ids.long()]


def embedding_backward(dy, ids, num_rows):
    return torch.zeros(num_rows, dy.shape[1], dtype=dy.dtype).index_add_(0, ids.long(), dy)


def value_head(hidden, weight, bias):
    value = (hidden.to(weight.dtype) @ weight.T).squeeze(-1)
    return value if bias is None else value + bias


def router(h, weight, num_chosen):
    logits = (h @ weight.T).float() if h.dtype != torch.float64 else h @ weight.T
    return logits, logits.softmax(-1).topk(num_chosen, dim=-1).indices


def parts_of(x, offsets):
    return [x[begin:end] for begin, end in itertools.pairwise(offsets)]


def grouped_gemm(x, offsets, weights):
    return torch.cat([part @ w.T for part, w in zip(parts_of(x, offsets), weights, strict=True)])


def grouped_gemm_backward_input(dy, offsets, weights):
    return torch.cat([part @ w for part, w in zip(parts_of(dy, offsets), weights, strict=True)])


def grouped_gemm_backward_weight(dy, x, offsets):
    pairs = zip(parts_of(dy, offsets), parts_of(x, offsets), strict=True)
    return [one.T @ other for one, other in pairs]


def unpermute(y, slot, weight):
    rows = y[slot]  # [T, k, E]
    return (rows if weight is None else rows * weight.to(y.dtype)[..., None]).sum(1)


EXPERTS = {
    "router": lambda slots: slots.replace("router", router),
    "grouped_gemm": lambda slots: slots.replace(
        "grouped_gemm",
        grouped_gemm,
        backward_input=grouped_gemm_backward_input,
        backward_weight=grouped_gemm_backward_weight,
    ),
    "permute": lambda slots: slots.replace("permute", lambda x, token: x[token]),
    "unpermute": lambda slots: slots.replace("unpermute", unpermute),
}

REPLACEMENTS = {
    "swiglu": lambda slots: slots.replace("swiglu", swiglu),
    "swiglu_explicit": lambda slots: slots.replace("swiglu", swiglu, swiglu_backward),
    "rms_norm": lambda slots: slots.replace("rms_norm", rms_norm),
    "rope": lambda slots: slots.replace("rope", rope, rope_backward),
    "linear": lambda slots: slots.replace(
        "linear",
        linear,
        backward_input=lambda dy, weight: dy @ weight,
        backward_weight=linear_backward_weight,
    ),
    "attention": lambda slots: slots.replace("attention", attention),
    "cross_entropy": lambda slots: slots.replace("cross_entropy", cross_entropy),
    "embedding": lambda slots: slots.replace("embedding", embedding, embedding_backward),
}


# --- gradients ---

CONFIG = {
    "data.train_files": "unused.jsonl",
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.entropy_coeff": 0.01,
}


def config_of(path, **changes) -> str:
    from banyan.config.resolve import resolve

    overrides = {**CONFIG, "actor_rollout_ref.model.path": str(path), **changes}
    tree = resolve([f"{key}={value}" for key, value in overrides.items()]).tree
    tree["_shell"] = {"num_train_rows": 8, "stop_ids": [0], "model_dir": str(path)}
    return json.dumps(tree)


def gradients(model, config: str):
    """Loss and a copy of all gradients of one mini-batch on shared trunks, cut into blocks."""
    trajectories = [
        {
            "row": i // 5,
            "index": i % 5,
            "prompt": sample[: len(sample) // 2],
            "response": sample[len(sample) // 2 :],
            "rollout_log_probs": [-1.0] * (len(sample) - len(sample) // 2),
        }
        for i, sample in enumerate(random_samples(2, 131))
        if len(sample) > 3
    ]
    for grad in model.grads().values():
        grad.zero_()
    out = _C.accumulate_gradients(
        model, config, trajectories, [0.5 - 0.1 * i for i in range(len(trajectories))]
    )
    return out, {name: grad.clone() for name, grad in model.grads().items()}


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
@pytest.mark.parametrize("block", [0, 64])
def test_a_replacement_in_pytorch_gives_loss_and_gradients_of_the_original(qwen3, name, block):
    changes = {} if block == 0 else {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": block}
    config = config_of(qwen3, **changes)
    model = _C.Model.load(str(qwen3), "fp64", with_backward=True)
    own, own_grads = gradients(model, config)
    assert (own["num_blocks"] > 1) == (block > 0)
    with feature.applied(one(lambda self, slots, args: REPLACEMENTS[name](slots))):
        assert _C.slots.dump() == [f"{name.split('_explicit')[0]}: mine"]
        got, got_grads = gradients(model, config)
    again, again_grads = gradients(model, config)
    assert got["loss"] == pytest.approx(own["loss"], rel=EXACT)
    for key, grad in own_grads.items():
        assert (got_grads[key] - grad).norm() <= EXACT * grad.norm(), key
        assert torch.equal(again_grads[key], grad), f"{key}: removing restores the bits"
    assert again["loss"] == own["loss"]


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_a_replaced_op_of_experts_gives_loss_and_gradients_of_the_original(qwen3_moe, name):
    config = config_of(qwen3_moe, **{"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64})
    model = _C.Model.load(str(qwen3_moe), "fp64", with_backward=True)
    own, own_grads = gradients(model, config)
    with feature.applied(one(lambda self, slots, args: EXPERTS[name](slots))):
        assert _C.slots.dump() == [f"{name}: mine"]
        got, got_grads = gradients(model, config)
    again, again_grads = gradients(model, config)
    assert got["loss"] == pytest.approx(own["loss"], rel=EXACT)
    for key, grad in own_grads.items():
        assert (got_grads[key] - grad).norm() <= EXACT * grad.norm(), key
        assert torch.equal(again_grads[key], grad), key
    assert again["loss"] == own["loss"]


def test_a_choice_of_experts_of_ones_own_is_followed(qwen3_moe):
    """The first experts for every token: those alone are trained."""

    def first_ones(h, weight, num_chosen):
        logits, _ = router(h, weight, num_chosen)
        return logits, torch.arange(num_chosen).expand(len(h), num_chosen)

    model = _C.Model.load(str(qwen3_moe), "fp64", with_backward=True)
    with feature.applied(one(lambda self, slots, args: slots.replace("router", first_ones))):
        _, grads = gradients(model, config_of(qwen3_moe))
    expert = "model.layers.0.mlp.experts.{}.down_proj.weight"
    assert grads[expert.format(0)].norm() > 0
    assert grads[expert.format(7)].norm() == 0


def test_a_replacement_that_differs_changes_loss_and_gradients(llama):
    model = _C.Model.load(str(llama), "fp64", with_backward=True)
    own, own_grads = gradients(model, config_of(llama))

    def halved(self, slots, args):
        slots.replace("swiglu", lambda gate_up: 0.5 * swiglu(gate_up))

    with feature.applied(one(halved)):
        got, got_grads = gradients(model, config_of(llama))
    assert abs(got["entropy_loss"] - own["entropy_loss"]) > 1e-4
    name = "model.layers.0.mlp.down_proj.weight"
    assert (got_grads[name] - own_grads[name]).norm() > 0.1 * own_grads[name].norm()


def test_a_value_head_of_ones_own(llama):
    model = _C.Model.load(str(llama), "fp64", head="value", with_backward=True)
    trajectories = [
        {
            "row": 0,
            "index": i,
            "prompt": [1, 2, 3],
            "response": [4, 5 + i],
            "rollout_log_probs": [-1.0, -1.0],
        }
        for i in range(3)
    ]
    values = [torch.zeros(2, dtype=torch.float64)] * 3
    returns = [torch.tensor([1.0, -1.0], dtype=torch.float64)] * 3

    def pass_over():
        for grad in model.grads().values():
            grad.zero_()
        out = _C.accumulate_value_gradients(model, config_of(llama), trajectories, values, returns)
        return out["loss"], {name: grad.clone() for name, grad in model.grads().items()}

    loss, grads = pass_over()
    with feature.applied(one(lambda self, slots, args: slots.replace("value_head", value_head))):
        got, got_grads = pass_over()
    assert got == pytest.approx(loss, rel=EXACT)
    for key, grad in grads.items():
        assert (got_grads[key] - grad).norm() <= EXACT * grad.norm(), key


# --- wrappers ---


def counting(calls: dict[str, int], slots: list[str]):
    def patches(self, faces, args):
        for slot in slots:

            def counted(inner, slot=slot):
                def count(name):
                    def call(*arguments):
                        calls[f"{slot}.{name}"] = calls.get(f"{slot}.{name}", 0) + 1
                        return inner.functions[name](*arguments)

                    return call

                return inner.with_functions(**{name: count(name) for name in inner.functions})

            faces.wrap(slot, counted)

    return patches


def test_wrappers_of_every_slot_count_calls_and_change_no_bit(qwen3_moe):
    slots = [name for name in _C.slots.names() if name != "value_head"]
    for dtype in ("bf16", "fp64"):
        model = _C.Model.load(str(qwen3_moe), dtype, with_backward=True)
        config = config_of(qwen3_moe, **{"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64})
        own, own_grads = gradients(model, config)
        calls: dict[str, int] = {}
        with feature.applied(one(counting(calls, slots))):
            got, got_grads = gradients(model, config)
        assert got["loss"] == own["loss"], dtype
        for key, grad in own_grads.items():
            assert torch.equal(got_grads[key], grad), (dtype, key)
        before = dict(calls)
        gradients(model, config)
        assert calls == before, "called after it was removed"
        assert {name.split(".")[0] for name in calls} == set(slots)
        # Of each layer: two norms and the heads' two; one norm at the end.
        assert calls["attention.forward"] >= 2 * own["num_blocks"]
        assert calls["attention.backward"] == 2 * own["num_blocks"]


def test_wrappers_stack_and_the_first_is_the_innermost(llama):
    model = _C.Model.load(str(llama), "fp64")
    order: list[str] = []

    def patches(self, slots, args):
        for label in ("first", "second"):

            def wrapper(inner, label=label):
                def forward(*arguments):
                    order.append(label)
                    return inner.forward(*arguments)

                return inner.with_functions(forward=forward)

            assert slots.wrap("swiglu", wrapper, label)
            assert not slots.wrap("swiglu", wrapper, label)

    with feature.applied(one(patches)):
        assert _C.slots.dump() == ["swiglu: original <- mine/first <- mine/second"]
        _C.score(model, [[1, 2, 3]])
    assert order == ["second", "first"] * 2


# --- whole steps: rollout, scoring and update ---


def test_a_step_with_a_replaced_activation_equals_one_with_the_original(tmp_path, llama):
    own = run(llama, tmp_path / "own", dtype="float64")[0].metrics[-1]
    with feature.applied(one(lambda self, slots, args: slots.replace("swiglu", swiglu))):
        got = run(llama, tmp_path / "mine", dtype="float64")[0].metrics[-1]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/rewards/mean"):
        assert got[name] == pytest.approx(own[name], rel=1e-9, abs=1e-12), name
    assert own["actor/grad_norm"] > 0


@pytest.mark.parametrize("slot", ["swiglu", "attention", "linear", "rms_norm"])
def test_the_rollout_computes_what_training_computes(tmp_path, llama, slot):
    """In bf16 the native pass of the rollout gives way: log-probabilities of both sides agree."""

    def other(self, slots, args):
        if slot == "swiglu":
            slots.replace(slot, lambda gate_up: (0.5 * swiglu(gate_up.float())).to(gate_up.dtype))
        elif slot == "attention":
            slots.replace(
                slot,
                lambda q, k, v, parent, scale: attention(
                    q.float(), k.float(), v.float(), parent, 0.5 * scale
                ).to(q.dtype),
            )
        elif slot == "linear":
            slots.replace(
                slot,
                lambda x, weight, bias: 0.9 * linear(x, weight, bias),
                backward_input=lambda dy, weight: 0.9 * (dy @ weight),
                backward_weight=lambda dy, x: (0.9 * (dy.T @ x), 0.9 * dy.sum(0)),
            )
        else:
            slots.replace(slot, lambda x, weight, eps: 0.9 * rms_norm(x, weight, eps))

    bf16 = {"actor_rollout_ref.rollout.dtype": "bfloat16"}
    own = run(llama, tmp_path / "own", **bf16)[0].metrics[-1]
    assert own["training/rollout_probs_diff_max"] == 0
    with feature.applied(one(other)):
        got = run(llama, tmp_path / "mine", **bf16)[0].metrics[-1]
    assert got["training/rollout_probs_diff_max"] < 0.02
    assert got["actor/entropy"] != pytest.approx(own["actor/entropy"], rel=1e-5)
    again = run(llama, tmp_path / "again", **bf16)[0].metrics[-1]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert again[name] == own[name], name


def test_a_wrapped_step_in_bf16_has_the_bits_of_a_plain_one(tmp_path, llama):
    bf16 = {"actor_rollout_ref.rollout.dtype": "bfloat16"}
    own = run(llama, tmp_path / "own", **bf16)[0]
    calls: dict[str, int] = {}
    slots = ["attention", "rms_norm", "rope", "swiglu", "linear", "embedding", "cross_entropy"]
    with feature.applied(one(counting(calls, slots))):
        got = run(llama, tmp_path / "mine", **bf16)[0]
    assert [t["response"] for t in got.trajectories] == [t["response"] for t in own.trajectories]
    for name in ("actor/pg_loss", "actor/grad_norm", "training/rollout_probs_diff_max"):
        assert got.metrics[-1][name] == own.metrics[-1][name], name
    assert calls["rms_norm.forward"] > calls["rms_norm.backward"] > 0


def test_what_changes_within_a_pass_takes_effect_after_it(llama):
    model = _C.Model.load(str(llama), "fp64")
    seen = []

    def patches(self, slots, args):
        def counted(inner):
            def forward(*arguments):
                seen.append(_C.slots.is_running())
                slots.remove()
                assert slots.apply() is False
                return inner.forward(*arguments)

            return inner.with_functions(forward=forward)

        slots.wrap("swiglu", counted)

    with feature.applied(one(patches)):
        own = _C.score(model, [[1, 2, 3]])
        assert seen == [True, True], "the second layer is called through the chain of the first"
        assert _C.slots.dump() == []
        assert torch.equal(_C.score(model, [[1, 2, 3]])["logprobs"][0], own["logprobs"][0])
    assert len(seen) == 2
    assert not _C.slots.is_running()


# --- what goes wrong ---


def test_errors_of_an_op_name_feature_slot_and_line(tmp_path, llama):
    model = _C.Model.load(str(llama), "fp32")
    with (
        feature.applied(
            one(lambda self, slots, args: slots.replace("swiglu", lambda gate_up: 1 / 0))
        ),
        pytest.raises(RunError, match=r"feature mine: swiglu: forward failed: ZeroDivisionError"),
    ):
        _C.score(model, [[1, 2, 3]])
    with (
        feature.applied(
            one(lambda self, slots, args: slots.replace("swiglu", lambda gate_up: gate_up))
        ),
        pytest.raises(
            ValueError, match=r"\[feature\] swiglu of mine: wanted y \[3, 112\] Float on cpu"
        ),
    ):
        _C.score(model, [[1, 2, 3]])
    detached = lambda self, slots, args: slots.replace(  # noqa: E731
        "swiglu", lambda gate_up: swiglu(gate_up).detach()
    )
    with (
        feature.applied(one(detached)),
        pytest.raises(RunError, match="wanted a result that depends on gate_up, got a constant"),
    ):
        gradients(_C.Model.load(str(llama), "fp64", with_backward=True), config_of(llama))


def test_wrong_registrations_are_refused(llama):
    slots = feature.Slots("mine")
    with pytest.raises(UserError, match=r"got 'swigloo'; the nearest is swiglu"):
        slots.wrap("swigloo", lambda inner: inner)
    slots.replace("swiglu", swiglu)
    other = feature.Slots("other")
    with pytest.raises(UserError, match="got that of 'other' beside that of 'mine'"):
        other.replace("swiglu", swiglu)
    other.replace("swiglu", swiglu, force=True)
    with pytest.raises(UserError, match="wanted the name of a wrapper there"):
        other.remove_wrapper("swiglu", "x")
    slots.wrap("rope", lambda inner: 3, "bad")
    with pytest.raises(UserError, match="wanted bad to return an op"):
        slots.apply()
    assert (slots.remove(), other.remove()) == (1, 1)


def test_sums_of_squares_and_another_cross_entropy_exclude_each_other(llama):
    model = _C.Model.load(str(llama), "fp64")
    with feature.applied(
        one(lambda self, slots, args: slots.replace("cross_entropy", cross_entropy))
    ):
        own = _C.score(model, [[1, 2, 3]])
        assert len(own["logprobs"][0]) == 2
        with pytest.raises(ValueError, match=r"\[feature\] cross_entropy: wanted the original"):
            _C.score(model, [[1, 2, 3]], with_sum_squares=True)


# --- the example ---


def test_the_example_compares_and_counts(llama, capsys):
    example = load_example()
    figures = example.main(["--model", str(llama)])
    assert figures["under the features"] < 1e-5
    assert figures["after them"] == 0
    assert figures["norms counted"] == 5  # two of each of two layers, and the last one
    assert "norms counted: 5" in capsys.readouterr().out
