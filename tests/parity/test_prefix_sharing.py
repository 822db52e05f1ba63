"""prefix-0501's tensor cases (specification B7) restated on tree attention and edge log-probabilities.

That design trims each reuser to its suffix, puts a copy of its provider's keys and values in front of it (torch_ref),
and restores the log-probabilities of the reused columns. The reference here does exactly that in plain PyTorch, row by
row in batch order; banyan's ops on the packed trie must give the same numbers and gradients from keys in place.
"""

from __future__ import annotations

import pytest
import torch

import banyan.ops
import banyan.trie

P3 = [[1, 2, 3, 10, 11, 12], [1, 2, 3, 20, 21]]  # lengths 6 and 5, prefix 3
CHAIN = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 30, 31, 32, 33],
    [1, 2, 3, 30, 31, 40],
]  # lengths 8, 7, 6, prefixes 0, 3, 5
FIVE_AND_FIVE = [[1, 2, 3, 10, 11], [1, 2, 3, 20, 21]]


def plan(rows: list[list[int]]) -> list[tuple[int, int]]:
    """(provider, prefix length) of each row: the longest match with an earlier row."""
    out = []
    for index, row in enumerate(rows):
        best = (index, 0)
        for earlier in range(index):
            same = 0
            for a, b in zip(row, rows[earlier], strict=False):
                if a != b:
                    break
                same += 1
            if same > best[1]:
                best = (earlier, same)
        out.append(best)
    return out


def inputs(packed, heads=4, kv_heads=2, dim=6, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(packed.num_unique, count, dim, generator=draw, dtype=dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def causal(q, k, v, first: int):
    """Queries at positions first, first + 1, ... over keys 0, 1, ...; a key is seen up to the query's position."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    position = first + torch.arange(len(q))
    masked = torch.arange(len(k))[None] > position[:, None]
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(masked, -torch.inf).softmax(-1), v)


def torch_ref(rows, packed, q, k, v):
    """Suffix queries of every row over its own copy of all its keys; also the lengths of those copies."""
    outputs, expanded = [], []
    for index, (_, prefix) in enumerate(plan(rows)):
        path = packed.path(index)
        expanded.append(len(path))
        outputs.append(causal(q[path[prefix:]], k[path], v[path], prefix))
    return outputs, expanded


def suffixes(rows, packed, values):
    """The same tokens out of values on the trie."""
    return [values[packed.path(i)[prefix:]] for i, (_, prefix) in enumerate(plan(rows))]


@pytest.mark.parametrize(
    ("rows", "prefixes", "kept", "expanded"),
    [
        (P3, [0, 3], 8, [6, 5]),
        (CHAIN, [0, 3, 5], 13, [8, 7, 6]),
        (FIVE_AND_FIVE, [0, 3], 7, [5, 5]),
    ],
)
def test_outputs_and_gradients_equal_those_of_expanded_keys(rows, prefixes, kept, expanded):
    packed = banyan.trie.pack(rows)
    assert [prefix for _, prefix in plan(rows)] == prefixes
    assert packed.num_unique == kept
    tensors = inputs(packed)
    ours = banyan.ops.tree_attention(*tensors, packed)
    theirs, lengths = torch_ref(rows, packed, *tensors)
    assert lengths == expanded  # what exists only in that design: 11, 21 and 10 keys
    seed = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=seed, dtype=x.dtype) for x in theirs]
    for mine, want in zip(suffixes(rows, packed, ours), theirs, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-12)
    losses = [
        sum((x * w).sum() for x, w in zip(values, weights, strict=True))
        for values in (suffixes(rows, packed, ours), theirs)
    ]
    gradients = [torch.autograd.grad(loss, tensors, retain_graph=True) for loss in losses]
    for mine, want in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-12)


def test_keys_stay_where_they_are():
    """The store's identity case: the trunk's keys are one tensor for all rows, and its gradient is theirs."""
    packed = banyan.trie.pack(P3)
    q, k, v = inputs(packed)
    out = banyan.ops.tree_attention(q, k, v, packed)
    assert k.shape[0] == v.shape[0] == packed.num_unique == 8
    (from_reuser,) = torch.autograd.grad(out[packed.path(1)[3:]].sum(), v, retain_graph=True)
    (from_provider,) = torch.autograd.grad(out[packed.path(0)].sum(), v, retain_graph=True)
    trunk = packed.path(1)[:3]
    assert torch.equal(trunk, packed.path(0)[:3])
    assert (from_reuser[trunk].abs() > 0).all()  # the gradient reaches the provider's rows
    (both,) = torch.autograd.grad(out[packed.path(0)].sum() + out[packed.path(1)[3:]].sum(), v)
    torch.testing.assert_close(both, from_reuser + from_provider, rtol=0, atol=1e-13)


def test_the_first_suffix_query_sees_its_prefix_and_itself():
    packed = banyan.trie.pack(P3)
    q, k, v = inputs(packed)
    out = banyan.ops.tree_attention(q, k, v, packed)
    (seen,) = torch.autograd.grad(out[packed.path(1)[3]].sum(), v)
    where = seen.abs().sum((1, 2)) > 0
    assert where.nonzero().flatten().tolist() == packed.path(1)[:4].tolist()


def test_grouped_heads():
    packed = banyan.trie.pack(P3)
    tensors = inputs(packed, heads=4, kv_heads=2)
    theirs, _ = torch_ref(P3, packed, *tensors)
    ours = suffixes(P3, packed, banyan.ops.tree_attention(*tensors, packed))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="multiple"):
        banyan.ops.tree_attention(*inputs(packed, heads=3, kv_heads=2), packed)


def test_an_output_gate_is_a_matter_of_the_token():
    """gated_attention: the gate multiplies what comes out; it is never part of what is shared."""
    packed = banyan.trie.pack(CHAIN)
    tensors = inputs(packed)
    gate = torch.randn(tensors[0].shape, dtype=torch.float64).requires_grad_()
    gated = banyan.ops.tree_attention(*tensors, packed) * gate.sigmoid()
    theirs, _ = torch_ref(CHAIN, packed, *tensors)
    for index, (_, prefix) in enumerate(plan(CHAIN)):
        path = packed.path(index)[prefix:]
        torch.testing.assert_close(gated[path], theirs[index] * gate[path].sigmoid())


@pytest.mark.parametrize("wrong", [6, 8])
def test_queries_of_another_length_are_refused(wrong):
    """The case of a sequence-local shard: 7 tokens are wanted, not a part of them."""
    packed = banyan.trie.pack(FIVE_AND_FIVE)
    q, k, v = inputs(packed)
    with pytest.raises(ValueError, match=r"\[tree_attention\]|\[trie_attention\]"):
        banyan.ops.tree_attention(torch.zeros(wrong, 4, 6, dtype=torch.float64), k, v, packed)
    with pytest.raises(ValueError, match=r"attention\]"):
        banyan.ops.tree_attention(q[0], k, v, packed)


def test_no_sharing_changes_nothing():
    rows = [[1, 2], [3, 4], [5]]
    packed = banyan.trie.pack(rows)
    assert packed.num_unique == packed.num_logical == 5
    tensors = inputs(packed)
    theirs, _ = torch_ref(rows, packed, *tensors)
    ours = suffixes(rows, packed, banyan.ops.tree_attention(*tensors, packed))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def head(packed, vocab=50, dim=10):
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(packed.num_unique, dim, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=draw, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_()


def restored(rows, packed, hidden, weight):
    """Log-probabilities and entropies as that design rebuilds them: interior columns copied from the provider, the
    column behind the prefix computed anew from the saved row of the provider, the rest from the row's own suffix."""
    log_probs, entropies = [], []
    table = (hidden @ weight.T).log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    for index, (provider, prefix) in enumerate(plan(rows)):
        path = packed.path(index)
        labels = torch.tensor(rows[index])
        own = table[path[prefix:-1]].gather(-1, labels[prefix + 1 :, None])[:, 0]
        own_entropy = entropy[path[prefix:-1]]
        if prefix == 0:
            log_probs.append(own)
            entropies.append(own_entropy)
            continue
        copied = log_probs[provider][: prefix - 1]
        saved = table[packed.path(provider)[prefix - 1]]
        at_last = saved[labels[prefix]][None] if prefix < len(labels) else own[:0]
        log_probs.append(torch.cat([copied, at_last, own]))
        kept = prefix if prefix < len(labels) else prefix - 1
        source = entropies[provider][:kept]
        if len(source) < kept:  # the provider ends there: its last row predicts nothing of its own
            source = torch.cat([source, entropy[packed.path(provider)[kept - 1]][None]])
        entropies.append(torch.cat([source, own_entropy]))
    return log_probs, entropies


@pytest.mark.parametrize(
    "rows",
    [
        P3,
        CHAIN,
        FIVE_AND_FIVE,
        [[1, 2, 3], [1, 2, 3]],  # a row without suffix
        [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]],  # a provider that ends where the reuser goes on
        [[1, 2], [3, 4]],
    ],
)
def test_restored_columns_are_the_edges(rows):
    packed = banyan.trie.pack(rows)
    hidden, weight = head(packed)
    ours, entropy = banyan.ops.edge_logprob(hidden, weight, packed, entropy=True)
    theirs, their_entropy = restored(rows, packed, hidden, weight)
    for mine, want in zip(packed.split(ours), theirs, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-12)
    for mine, want in zip(packed.split(entropy), their_entropy, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(sum((x * x).sum() for x in values), [hidden, weight], retain_graph=True)
        for values in (packed.split(ours), theirs)
    ]
    for mine, want in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-11)


def test_the_token_behind_the_prefix_is_scored_from_the_providers_last_row():
    """One saved row per reuser there, one row for all of them here; its gradient reaches the provider's token."""
    packed = banyan.trie.pack(P3)
    hidden, weight = head(packed)
    first_suffix = packed.split(banyan.ops.edge_logprob(hidden, weight, packed))[1][2]
    (reached,) = torch.autograd.grad(first_suffix, hidden)
    rows = reached.abs().sum(-1).nonzero().flatten().tolist()
    assert rows == [packed.path(0)[2].item()]
    assert packed.edges.source.tolist().count(rows[0]) == 1


def test_a_zero_length_suffix_costs_no_token():
    packed = banyan.trie.pack([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert packed.num_unique == 3
    assert [len(x) for x in packed.unpack(torch.arange(3))] == [3, 3, 3]


def test_bf16_kernels_stay_near_the_reference():
    """The bound of the accelerator cases: 5e-2 on outputs, 2e-1 on gradients."""
    packed = banyan.trie.pack(CHAIN)
    exact = inputs(packed, dim=16)
    rounded = [x.detach().to(torch.bfloat16).requires_grad_() for x in exact]
    ours = banyan.ops.tree_attention(*rounded, packed)
    theirs = torch.cat(torch_ref(CHAIN, packed, *exact)[0])
    assert (torch.cat(suffixes(CHAIN, packed, ours)).double() - theirs).abs().max() < 5e-2
    mine = torch.autograd.grad(ours.float().sum(), rounded)
    # The trie's tokens in the order of its rows: every token is the suffix of exactly one row.
    want = torch.autograd.grad(theirs.sum(), exact)
    for a, b in zip(mine, want, strict=True):
        assert (a.double() - b).abs().max() < 2e-1
