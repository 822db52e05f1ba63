"""The library for other trainers: packed tries, tree attention and edge log-probabilities against padded batches in
plain PyTorch and unmodified models of transformers."""

from __future__ import annotations

import functools
import random
import threading

import banyan.transformers
import pytest
import torch
import transformers
from conftest import needs_smollm2
from models import CONFIGS

VOCAB = 131
TOY = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 10], [1, 2, 3], [1, 2, 3, 4, 5, 6, 11]]
TOY += [[1, 2, 3, 4, 9, 10], [12, 13, 14], [12, 13, 15, 2, 1]]


def random_samples(seed: int, longest: int = 12) -> list[list[int]]:
    """Samples on a random forest, in random order, with a duplicate, a prefix of another and one token alone."""
    draw = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, most))]

    trunks = [ids(4), ids(longest)]
    for _ in range(3):
        trunks += [draw.choice(trunks) + ids(longest) for _ in range(3)]
    samples = [*trunks[2:], list(trunks[-1]), trunks[-2][:3], [7]]
    draw.shuffle(samples)
    return samples


def random_masks(seed: int, samples: list[list[int]]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[int(draw.random() < 0.7) for _ in sample] for sample in samples]


def dense_attention(q, k, v, packed, scale):
    """One masked softmax over [H, T, T]: key j is seen by i iff j <= i < tout[j]."""
    index = torch.arange(packed.num_unique)
    seen = (index[None] <= index[:, None]) & (index[:, None] < packed.tout[None])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def attention_inputs(packed, heads=4, kv_heads=2, dim=6, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, dim)]
    return [
        torch.randn(packed.num_unique, *shape, generator=draw, dtype=dtype).requires_grad_()
        for shape in shapes
    ]


def head_inputs(packed, vocab=VOCAB, dim=10, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(packed.num_unique, dim, generator=draw, dtype=dtype)
    weight = torch.randn(vocab, dim, generator=draw, dtype=dtype) / 2
    return hidden.requires_grad_(), weight.requires_grad_()


# --- the trie -----------------------------------------------------------------------------------


def test_the_toy_batch_packs_as_specified():
    packed = banyan.trie.pack(TOY)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 11, 9, 10, 12, 13, 14, 15, 2, 1]
    assert packed.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 5, 3, 9, -1, 11, 12, 12, 14, 15]
    assert packed.tout.tolist() == [11] * 4 + [9, 9, 8, 8, 9, 11, 11, 17, 17, 14, 17, 17, 17]
    assert packed.segments[1].tolist() == [3, 4, 11, 0, 4, 3]
    assert (packed.num_logical, packed.num_unique, packed.num_pairs) == (38, 17, 72)
    assert (len(packed.edges.token), len(packed.edges.source)) == (15, 12)
    assert repr(packed) == "PackedTrie(7 samples, 38 tokens, 17 unique, 2.24x, 9 segments)"


@pytest.mark.parametrize("seed", range(5))
def test_unpack_after_pack_is_the_identity(seed):
    samples = random_samples(seed)
    packed = banyan.trie.pack(samples)
    assert [x.tolist() for x in packed.unpack(packed.tokens)] == samples
    assert [packed.tokens[packed.path(s)].tolist() for s in range(len(samples))] == samples
    for sample, places in zip(samples, packed.unpack(packed.position_ids), strict=True):
        assert places.tolist() == list(range(len(sample)))
    assert packed.lengths == list(map(len, samples))


def test_unpack_hands_gradients_back_summed():
    packed = banyan.trie.pack([[1, 2, 3], [1, 2, 4]])
    values = torch.zeros(4, 2, requires_grad=True)
    first, second = packed.unpack(values)
    (first.sum() + 10 * second.sum()).backward()
    assert values.grad[:, 0].tolist() == [11, 11, 1, 10]


def test_sharing_off_positions_and_thresholds():
    samples = [[1, 2, 3], [1, 2, 4]]
    assert banyan.trie.pack(samples, share=False).num_unique == 6
    assert banyan.trie.pack(samples, min_prefix_len=3).num_unique == 6
    assert banyan.trie.pack(samples, min_group_size=3).num_unique == 6
    shifted = banyan.trie.pack(samples, positions=[[0, 1, 2], [0, 5, 6]])
    assert (shifted.num_unique, shifted.positions.tolist()) == (5, [0, 1, 2, 5, 6])
    tensors = banyan.trie.pack(torch.tensor(samples))
    assert (
        tensors.num_unique == banyan.trie.pack([torch.tensor(s) for s in samples]).num_unique == 4
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"samples": []}, ValueError, r"\[trie\] samples: wanted at least one"),
        ({"samples": [[1], []]}, ValueError, r"\[trie\] sample 1: wanted at least one token"),
        ({"samples": [[1, -100]]}, ValueError, r"sample 0: wanted token ids >= 0, got -100 at 1"),
        ({"samples": [[1], [2.5]]}, TypeError, r"wanted a list of integers for sample 1.*2\.5"),
        ({"samples": ["abc"]}, TypeError, r"wanted a list of integers for sample 0, got str"),
        ({"samples": [1, 2]}, TypeError, r"for sample 0, got int 1"),
        ({"samples": [[2**40]]}, ValueError, r"32-bit"),
        (
            {"samples": [[1]], "scored": []},
            ValueError,
            r"scored: wanted one per sample \(1\), got 0",
        ),
        ({"samples": [[1]], "scored": [[1, 1]]}, ValueError, r"sample 0 scored: wanted 1, got 2"),
        ({"samples": [[1]], "positions": [[]]}, ValueError, r"sample 0 positions: wanted 1, got 0"),
        ({"samples": [[1]], "min_group_size": 1}, ValueError, r"min_group_size: wanted >= 2"),
    ],
)
def test_pack_names_what_is_wrong(arguments, error, text):
    with pytest.raises(error, match=text):
        banyan.trie.pack(**arguments)


def test_values_of_another_batch_are_refused():
    packed = banyan.trie.pack(TOY)
    with pytest.raises(ValueError, match=r"\[unpack\] values: wanted \[17, ...\], got \[16\]"):
        packed.unpack(torch.zeros(16))
    with pytest.raises(ValueError, match=r"\[split\] values: wanted \[31, ...\]"):
        packed.split(torch.zeros(17))
    with pytest.raises(IndexError, match=r"\[trie\] sample: wanted one of 7, got 7"):
        packed.path(7)


# --- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_tree_attention_equals_a_masked_softmax(seed, dtype, bound):
    packed = banyan.trie.pack(random_samples(seed))
    inputs = attention_inputs(packed, dtype=dtype, seed=seed)
    target = torch.randn(packed.num_unique, 4, 6, dtype=dtype)
    results = []
    for function in (banyan.ops.tree_attention, dense_attention):
        out = function(*inputs, packed, 0.3)
        results.append([out, *torch.autograd.grad((out * target).sum(), inputs)])
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= bound * max(1.0, want.abs().max())


def test_tree_attention_in_bf16_is_as_close_as_plain_bf16():
    packed = banyan.trie.pack(random_samples(1, longest=90))
    exact = attention_inputs(packed, dim=16)
    inputs = [x.detach().bfloat16().requires_grad_() for x in exact]
    errors = []
    for function in (banyan.ops.tree_attention, dense_attention):
        results = []
        for values in (exact, inputs):
            out = (dense_attention if values is exact else function)(*values, packed, 0.25)
            results.append([out, *torch.autograd.grad(out.double().pow(2).sum(), values)])
        errors.append([(a - b.double()).norm().item() for a, b in zip(*results, strict=True)])
    for ours, plain in zip(*errors, strict=True):
        assert ours <= 1.1 * plain


def test_tree_attention_gradcheck():
    packed = banyan.trie.pack(TOY)
    inputs = attention_inputs(packed, heads=2, kv_heads=1, dim=2)
    assert torch.autograd.gradcheck(
        lambda *x: banyan.ops.tree_attention(*x, packed), inputs, fast_mode=True
    )


def test_second_derivatives_are_refused_by_name():
    packed = banyan.trie.pack(TOY)
    q, k, v = attention_inputs(packed)
    out = banyan.ops.tree_attention(q, k, v, packed)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"\[tree_attention\] second derivatives"):
        grad.sum().backward()
    hidden, weight = head_inputs(packed)
    (grad,) = torch.autograd.grad(
        banyan.ops.edge_logprob(hidden, weight, packed).sum(), hidden, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"\[edge_logprob\] second derivatives"):
        grad.pow(2).sum().backward()


def test_tree_attention_names_what_is_wrong():
    packed = banyan.trie.pack(TOY)
    q, k, v = attention_inputs(packed)
    with pytest.raises(ValueError, match=r"wanted \[17, heads, head_dim\], got \[16, 4, 6\]"):
        banyan.ops.tree_attention(q[:16], k[:16], v[:16], packed)
    with pytest.raises(ValueError, match=r"H a multiple of K"):
        banyan.ops.tree_attention(q[:, :3], k, v, packed)
    with pytest.raises(ValueError, match=r"\[tree_attention\] dtype: wanted bfloat16, float32 or"):
        banyan.ops.tree_attention(q.half(), k.half(), v.half(), packed)
    with pytest.raises(ValueError, match=r"\[tree_attention\] q: wanted \[T, H, D\]"):
        banyan.ops.tree_attention(q[None], k, v, packed)


def test_one_trie_serves_several_threads():
    packed = banyan.trie.pack(random_samples(3, longest=60))
    inputs = [x.detach().bfloat16() for x in attention_inputs(packed, dim=16)]
    want = banyan.ops.tree_attention(*inputs, packed)
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.extend(
                banyan.ops.tree_attention(*inputs, packed) for _ in range(5)
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    assert all(torch.equal(result, want) for result in results)


# --- log-probabilities --------------------------------------------------------------------------


def dense_logprob(hidden, weight, samples, masks, packed, temperature):
    """log_softmax over the whole vocabulary, sample by sample: log-probabilities and entropies, [U] each."""
    table = (hidden @ weight.T / temperature).log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    logprobs, entropies = [], []
    for s, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        path = packed.path(s)
        for t in range(1, len(sample)):
            if mask[t]:
                logprobs.append(table[path[t - 1], sample[t]])
                entropies.append(entropy[path[t - 1]])
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_edge_logprob_equals_log_softmax(seed, temperature):
    samples = random_samples(seed)
    masks = random_masks(seed, samples)
    packed = banyan.trie.pack(samples, scored=masks)
    inputs = head_inputs(packed, seed=seed)
    want = dense_logprob(*inputs, samples, masks, packed, temperature)
    got = banyan.ops.edge_logprob(*inputs, packed, temperature, entropy=True)
    draw = torch.Generator().manual_seed(seed)
    target = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in want]
    gradients = [
        torch.autograd.grad(sum((x * t).sum() for x, t in zip(pair, target, strict=True)), inputs)
        for pair in (got, want)
    ]
    for a, b in zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, b.abs().max())
    counts = [sum(mask[1:]) for mask in masks]
    assert [len(x) for x in packed.split(got[0])] == packed.edges.counts == counts
    assert torch.equal(
        packed.edges.logical_sample.bincount(minlength=len(samples)), torch.tensor(counts)
    )


def test_edge_logprob_per_edge_and_gradcheck():
    packed = banyan.trie.pack(TOY)
    hidden, weight = head_inputs(packed, vocab=17, dim=3)
    logprob, entropy = banyan.ops.edge_logprob(hidden, weight, packed, entropy=True, per_edge=True)
    assert (len(logprob), len(entropy)) == (15, 12)
    gathered = banyan.ops.edge_logprob(hidden[None], weight, packed)
    assert torch.equal(logprob[packed.edges.logical_edge], gathered)
    assert torch.autograd.gradcheck(
        lambda h, w: banyan.ops.edge_logprob(h, w, packed, 0.8, entropy=True),
        (hidden, weight),
        fast_mode=True,
    )


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_edge_logprob_in_bf16(weight_dtype):
    packed = banyan.trie.pack(random_samples(2))
    exact = head_inputs(packed, vocab=500, dim=32)
    hidden, weight = (x.detach().bfloat16() for x in exact)
    given = (hidden.requires_grad_(), weight.to(weight_dtype).requires_grad_())
    rounded = [x.detach().double().requires_grad_() for x in given]
    got = banyan.ops.edge_logprob(*given, packed)
    want = banyan.ops.edge_logprob(*rounded, packed)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=0)
    got.sum().backward()
    want.sum().backward()
    for ours, theirs in zip(given, rounded, strict=True):
        assert ours.grad.dtype == ours.dtype
        assert (ours.grad.double() - theirs.grad).norm() <= 1e-2 * theirs.grad.norm()


def test_nothing_scored_gives_an_empty_tensor():
    packed = banyan.trie.pack([[1], [2]])
    for dtype in (torch.float64, torch.bfloat16):
        hidden, weight = (
            x.detach().to(dtype).requires_grad_() for x in head_inputs(packed, dim=16)
        )
        logprob = banyan.ops.edge_logprob(hidden, weight, packed)
        assert logprob.shape == (0,)
        logprob.sum().backward()
        assert hidden.grad.abs().sum() == 0


def test_edge_logprob_names_what_is_wrong():
    packed = banyan.trie.pack(TOY)
    hidden, weight = head_inputs(packed, vocab=16)
    with pytest.raises(ValueError, match=r"\[edge_logprob\] temperature: wanted > 0, got 0"):
        banyan.ops.edge_logprob(hidden, weight, packed, temperature=0)
    with pytest.raises(ValueError, match=r"\[edge_logprob\] values: wanted \[17, ...\]"):
        banyan.ops.edge_logprob(hidden[:3], weight, packed)
    with pytest.raises(ValueError, match=r"wanted an id in \[0, 10\), got 1[0-9]"):
        banyan.ops.edge_logprob(hidden, weight[:10], packed)
    with pytest.raises(ValueError, match=r"\[edge_logprob\] hidden: wanted Double \[R, 9\]"):
        banyan.ops.edge_logprob(hidden, weight[:, :9], packed)


# --- models of transformers ---------------------------------------------------------------------


# transformers computes norms and eager's softmax in fp32 whatever the model's dtype. Where fp64 is compared, both sides
# get the same norm in fp64, and the padded side a softmax in fp64.
def norm_in_fp64(module, x):
    return (
        module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    )


def eager_in_fp64(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def make_model(name: str, dtype: torch.dtype = torch.float64, **changes):
    torch.manual_seed(0)
    config = CONFIGS[name].__class__(**{**CONFIGS[name].to_dict(), **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith((".bias", "norm.weight")):
                value.add_(0.1 * torch.randn_like(value))
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = functools.partial(norm_in_fp64, module)
    return model.to(dtype).train()


def padded_logprobs(model, samples, masks, temperature=1.0):
    """The usual way: one padded batch, full logits."""
    width = max(map(len, samples))
    ids = torch.tensor([sample + [0] * (width - len(sample)) for sample in samples])
    seen = torch.tensor([[1] * len(sample) + [0] * (width - len(sample)) for sample in samples])
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    table = (logits[:, :-1] / temperature).log_softmax(-1)
    chosen = table.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(table.exp() * table).sum(-1)
    kept = torch.tensor([[*mask[1:], *[0] * (width - len(mask))] for mask in masks]).bool()
    return chosen[kept], entropy[kept]


def loss_of(logprob, entropy, seed):
    """Something nonlinear that differs from token to token, as a policy loss does."""
    draw = torch.Generator().manual_seed(seed)
    old = logprob.detach() + 0.3 * torch.randn(logprob.shape, generator=draw, dtype=logprob.dtype)
    advantage = torch.randn(logprob.shape, generator=draw, dtype=logprob.dtype)
    ratio = (logprob - old).exp()
    clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return clipped.mean() - 0.01 * entropy.mean()


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


@pytest.fixture
def exact_eager():
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    transformers.AttentionInterface.register("eager_fp64", eager_in_fp64)
    AttentionMaskInterface.register("eager_fp64", eager_mask)
    return "eager_fp64"


@pytest.mark.parametrize("name", ["llama", "llama_untied", "qwen2", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_models_equal_their_padded_batches(name, checkpointing, dtype, bound, exact_eager):
    samples = random_samples(11)
    masks = random_masks(12, samples)
    packed = banyan.trie.pack(samples, scored=masks)
    model = make_model(name, dtype)
    model.set_attn_implementation("eager" if dtype == torch.float32 else exact_eager)
    want = padded_logprobs(model, samples, masks, 0.9)
    want_loss = loss_of(*want, 5)
    want_gradients = gradients_of(model, want_loss)
    model.set_attn_implementation("banyan_trie")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    got = banyan.transformers.logprobs(model, packed, 0.9, entropy=True)
    loss = loss_of(*got, 5)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= bound * b.abs().max()
    gradients = gradients_of(model, loss)
    assert max(value.norm() for value in want_gradients.values()) > 0
    for key, value in want_gradients.items():
        assert (gradients[key] - value).norm() <= bound * max(value.norm(), 1e-3), key


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_backward_reads_the_trie_of_its_own_forward(reentrant):
    """Two batches forward, then both backward: the recomputation must not see the newer trie."""
    model = make_model("llama")
    model.set_attn_implementation("banyan_trie")
    batches = [banyan.trie.pack(random_samples(seed)) for seed in (1, 2)]
    want = sum(
        torch.cat([g.flatten() for g in gradients_of(model, loss).values()])
        for loss in (banyan.transformers.logprobs(model, packed).mean() for packed in batches)
    )
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    losses = [banyan.transformers.logprobs(model, packed).mean() for packed in batches]
    del batches
    got = torch.cat([g.flatten() for g in gradients_of(model, sum(losses)).values()])
    assert (got - want).norm() <= 1e-10 * want.norm()


def test_the_trie_as_a_keyword_of_the_whole_model():
    model = make_model("qwen3")
    samples = random_samples(4)
    packed = banyan.trie.pack(samples)
    model.set_attn_implementation("sdpa")
    alone = [model(input_ids=torch.tensor([sample])).logits[0] for sample in samples]
    model.set_attn_implementation("banyan_trie")
    logits = model(packed.input_ids, position_ids=packed.position_ids, banyan_trie=packed).logits
    for got, want in zip(packed.unpack(logits), alone, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_autocast_takes_bf16():
    model = make_model("llama", torch.float32)
    model.set_attn_implementation("banyan_trie")
    packed = banyan.trie.pack(random_samples(6))
    exact = banyan.transformers.logprobs(model, packed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprob = banyan.transformers.logprobs(model, packed)
    assert 0 < (logprob - exact).abs().max() < 0.1
    gradients = gradients_of(model, logprob.mean())
    exact_gradients = gradients_of(model, exact.mean())
    for key, value in exact_gradients.items():
        assert gradients[key].dtype == torch.float32
        assert (gradients[key] - value).norm() <= 0.1 * value.norm() + 1e-4, key


def refusal(model, packed, **changes) -> str:
    inputs = {"position_ids": packed.position_ids, "banyan_trie": packed, **changes}
    with pytest.raises(ValueError, match=r"^\[banyan_trie\] ") as caught:
        model(input_ids=inputs.pop("input_ids", packed.input_ids), **inputs)
    return str(caught.value)


def test_calls_that_would_be_wrong_are_refused():
    model = make_model("llama")
    model.set_attn_implementation("banyan_trie")
    packed = banyan.trie.pack(TOY)
    ids = packed.input_ids
    assert "wanted banyan_trie=packed in the model's call" in refusal(
        model, packed, banyan_trie=None
    )
    assert "position_ids: wanted packed.position_ids" in refusal(model, packed, position_ids=None)
    padded = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    assert "wanted no padding" in refusal(model, packed, attention_mask=padded)
    mask = torch.zeros(1, 1, 17, 17, dtype=torch.float64)
    assert "the trie is the mask" in refusal(model, packed, attention_mask=mask)
    assert "batch: wanted (1, 17), got (2, 17)" in refusal(
        model, packed, input_ids=ids.expand(2, -1)
    )
    assert "batch: wanted (1, 17), got (1, 16)" in refusal(
        model, packed, input_ids=ids[:, 1:], position_ids=packed.position_ids[:, 1:]
    )
    cache = transformers.DynamicCache()
    model(ids, position_ids=packed.position_ids, banyan_trie=packed, past_key_values=cache)
    assert "keys (use_cache=False): wanted (1, 17), got (1, 34)" in refusal(
        model, packed, past_key_values=cache
    )
    with pytest.raises(ValueError, match=r"to generate, call model.set_attn_implementation"):
        model.generate(ids, max_new_tokens=1)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attention: wanted banyan_trie, got sdpa"):
        banyan.transformers.hidden_states(model, packed)


def tiny(config_class, **changes):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = config_class(**sizes, **heads, **changes)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="banyan_trie"
    ).train()


def test_models_that_a_trie_cannot_answer_are_refused_by_name():
    packed = banyan.trie.pack(TOY)
    dropout = make_model("llama", attention_dropout=0.1)
    dropout.set_attn_implementation("banyan_trie")
    assert "attention_dropout: wanted 0, got 0.1" in refusal(dropout, packed)
    banyan.transformers.hidden_states(dropout.eval(), packed)
    window = tiny(
        transformers.Qwen2Config, use_sliding_window=True, sliding_window=4, max_window_layers=0
    )
    assert "sliding_window: wanted none" in refusal(window, packed)
    assert "sliding_window: wanted none" in refusal(tiny(transformers.MistralConfig), packed)
    capped = tiny(transformers.Gemma2Config, layer_types=["full_attention"] * 2)
    assert "softcap: wanted none" in refusal(capped, packed)
    with pytest.raises(ValueError, match=r"final_logit_softcapping: wanted none, got 30"):
        banyan.transformers.logprobs(capped, packed)
    model = make_model("llama")
    model.set_attn_implementation("banyan_trie")
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"layers.0.mlp.act_fn.1: wanted no dropout, got 0.1"):
        banyan.transformers.hidden_states(model, packed)


@needs_smollm2
def test_smollm2_log_probabilities_equal_those_of_padded_rows(smollm2):
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    samples = random_samples(8)
    masks = [[1] * len(sample) for sample in samples]
    packed = banyan.trie.pack(samples)
    with torch.no_grad():
        want, _ = padded_logprobs(model, samples, masks)
        model.set_attn_implementation("banyan_trie")
        got = banyan.transformers.logprobs(model, packed)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
