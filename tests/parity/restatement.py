"""The algorithms restated in plain PyTorch on padded [S, T] tensors, from their formulas and nothing else.

Shares no code with banyan: masks instead of lists, autograd instead of hand-written gradients, fp64 throughout.
S sequences, T response positions; `m` is the response mask (observations and padding are 0), `g` the group of each
sequence. banyan's choices are marked T<n> as in its documents.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def mean_m(z: Tensor, m: Tensor) -> Tensor:
    return (z * m).sum() / m.sum()


def whiten(z: Tensor, m: Tensor) -> Tensor:
    if m.sum() < 2:
        return torch.zeros_like(z)
    mean = mean_m(z, m)
    variance = (((z - mean) ** 2) * m).sum() / (m.sum() - 1)
    return (z - mean) / torch.sqrt(variance + 1e-8) * m


# --- advantages -------------------------------------------------------------------------------------------------


def gae(r, m, value, gamma, lam, **_):
    advantage = torch.zeros_like(r)
    for i in range(r.shape[0]):
        next_value = next_advantage = torch.zeros((), dtype=r.dtype)
        for t in reversed(range(r.shape[1])):
            if m[i, t] == 0:
                continue
            delta = r[i, t] + gamma * next_value - value[i, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = value[i, t]
            advantage[i, t] = next_advantage
    return whiten(advantage, m), (advantage + value) * m


def per_group(score: Tensor, g: list[int], rule) -> Tensor:
    out = torch.zeros_like(score)
    for group in set(g):
        members = torch.tensor([i for i, other in enumerate(g) if other == group])
        values = score[members]
        if len(members) > 1 and values.max() > values.min():  # T20, T21
            out[members] = rule(values, members)
    return out


def grpo_values(score, g, by_std):
    def rule(values, _):
        return (values - values.mean()) / ((values.std() + 1e-6) if by_std else 1.0)

    return per_group(score, g, rule)


def outcome(a: Tensor, m: Tensor):
    advantage = a[:, None] * m
    return advantage, advantage


def total(r, m):
    return (r * m).sum(1)


def grpo(r, m, g, by_std=True, **_):
    return outcome(grpo_values(total(r, m), g, by_std), m)


def grpo_passk(r, m, g, by_std=True, **_):
    def rule(values, _):
        top = values.topk(2)
        out = torch.zeros_like(values)
        out[top.indices[0]] = (top.values[0] - top.values[1]) / (
            (values.std() + 1e-6) if by_std else 1.0
        )
        return out

    return outcome(per_group(total(r, m), g, rule), m)


def gdpo(r, m, g, components, component_weights, by_std=True, **_):
    a = sum(
        w * grpo_values(values, g, by_std)
        for w, values in zip(component_weights, components, strict=True)
    )
    advantage = whiten(a[:, None] * m, m)
    return advantage, advantage


def reinforce_plus_plus(r, m, gamma, **_):
    returns = torch.zeros_like(r)
    for i in range(r.shape[0]):
        q = torch.zeros((), dtype=r.dtype)
        for t in reversed(range(r.shape[1])):
            if m[i, t] == 1:
                q = r[i, t] + gamma * q
                returns[i, t] = q
    return whiten(returns, m), returns


def reinforce_plus_plus_baseline(r, m, g, **_):
    a = per_group(total(r, m), g, lambda values, _: values - values.mean())
    advantage = whiten(a[:, None] * m, m)
    return advantage, advantage


def rloo(r, m, g, **_):
    def rule(values, _):
        size = len(values)
        return (size * values - values.sum()) / (size - 1)

    return outcome(per_group(total(r, m), g, rule), m)


def opo(r, m, g, **_):
    lengths = m.sum(1)

    def rule(values, members):
        n = lengths[members]
        return values - (n * values).sum() / n.sum()

    return outcome(per_group(total(r, m), g, rule), m)


def to_go(r, m):
    return (r * m).flip(1).cumsum(1).flip(1) * m


def remax(r, m, greedy, **_):
    returns = to_go(r, m)
    return (returns - greedy[:, None]) * m, returns


def gpg(r, m, g, **_):
    score = total(r, m)
    spread = per_group(score, g, lambda values, _: torch.ones_like(values))
    alpha = len(g) / max(1.0, spread.sum().item())  # T28
    return outcome(alpha * per_group(score, g, lambda values, _: values - values.mean()), m)


def squeeze(z: Tensor, m: Tensor) -> Tensor:
    out = torch.zeros_like(z)
    for i in range(z.shape[0]):
        kept = z[i][m[i] == 1]
        out[i, : len(kept)] = kept
    return out


def optimal_token_baseline(r, m, g, l_old, q, w=None, **_):
    returns = to_go(r, m)
    e = 1 - 2 * l_old.exp() + q
    if w is not None:
        e = e * w**2
    power = (e * m).cumsum(1)
    steps = torch.arange(1, r.shape[1] + 1, dtype=r.dtype)
    lengths = (m * steps).max(1).values  # last masked position + 1
    advantage = torch.zeros_like(r)
    for group in set(g):
        members = torch.tensor([i for i, other in enumerate(g) if other == group])
        if len(members) < 2:
            continue  # T20
        mask, ret, weight = m[members], returns[members], power[members]
        baseline = (ret * weight * mask).sum(0) / ((weight * mask).sum(0) + 1e-8)
        for t in range(r.shape[1]):
            present = ret[:, t][mask[:, t] == 1]
            if len(present) and present.max() == present.min():  # T21
                baseline[t] = present[0]
        second = lengths[members].sort().values[-2]
        baseline = torch.where(steps - 1 < second, baseline, torch.zeros_like(baseline))
        advantage[members] = (ret - baseline) * mask
    return advantage, returns


def tir_optimal_token_baseline(r, m, g, l_old, q, w=None, **_):
    flat = squeeze(m, m)
    squeezed = [None if z is None else squeeze(z, m) for z in (r, l_old, q, w)]
    advantage, returns = optimal_token_baseline(
        squeezed[0], flat, g, squeezed[1], squeezed[2], squeezed[3]
    )
    out, back = torch.zeros_like(r), torch.zeros_like(r)
    for i in range(r.shape[0]):
        n = int(m[i].sum())
        out[i][m[i] == 1], back[i][m[i] == 1] = advantage[i, :n], returns[i, :n]
    return out, back


# --- policy losses ----------------------------------------------------------------------------------------------


def safe_exp(x):
    return torch.exp(torch.clamp(x, -20.0, 20.0))


def surrogate(a, ratio, o):
    plain = -a * ratio
    clipped = -a * torch.clamp(ratio, 1 - o["clip_ratio_low"], 1 + o["clip_ratio_high"])
    return torch.maximum(plain, clipped)


def vanilla(lp, l_old, a, m, o):
    loss = surrogate(a, safe_exp(lp - l_old), o)
    return torch.where(a < 0, torch.minimum(loss, -a * o["clip_ratio_c"]), loss)


def dppo(lp, l_old, a, o, keep):
    ratio = torch.clamp(safe_exp(lp - l_old), max=o["dppo_ratio_cap"]).detach()
    return -a * ratio * lp * keep


def dppo_tv(lp, l_old, a, m, o):
    gap = (lp.exp() - l_old.exp()).detach()
    keep = torch.where(a > 0, gap <= o["clip_ratio_high"], gap >= -o["clip_ratio_low"])
    return dppo(lp, l_old, a, o, keep)


def dppo_kl(lp, l_old, a, m, o):
    p, p_old = lp.detach().exp(), l_old.exp()
    kl = p_old * (l_old - lp.detach()) + (1 - p_old) * torch.log(
        (1 - p_old + 1e-8) / (1 - p + 1e-8)
    )
    keep = torch.where(
        a > 0,
        (kl <= o["clip_ratio_high"]) | (p <= p_old),
        (kl <= o["clip_ratio_low"]) | (p >= p_old),
    )
    return dppo(lp, l_old, a, o, keep)


def gspo(lp, l_old, a, m, o):
    s = ((lp - l_old) * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    return surrogate(a, safe_exp(s.detach() + lp - lp.detach()), o)


def sapo(lp, l_old, a, m, o):
    tau = torch.where(a > 0, torch.full_like(a, o["tau_pos"]), torch.full_like(a, o["tau_neg"]))
    return -a * torch.sigmoid(tau * (safe_exp(lp - l_old) - 1)) * 4 / tau


def gpg_loss(lp, l_old, a, m, o):
    return -a * lp


def cispo(lp, l_old, a, m, o):
    ratio = torch.clamp(
        safe_exp(lp - l_old), 1 - o["clip_ratio_low"], 1 + o["clip_ratio_high"]
    ).detach()
    return -ratio * a * lp


def dro(lp, l_old, a, m, o):
    return -(a * lp - 0.5 * o["dro_beta"] * (lp - l_old) ** 2)


def covariance(lp, a, m):
    return ((a - mean_m(a, m)) * (lp - mean_m(lp, m))).detach()


def kl_cov(lp, l_old, a, m, o):
    x = lp - l_old
    cov = covariance(lp, a, m).masked_fill(m == 0, -math.inf)
    count = max(1, int(o["kl_cov_ratio"] * m.sum().item()))
    held = torch.zeros_like(m).flatten()
    held[cov.flatten().topk(count).indices] = 1
    return -a * safe_exp(x) + o["ppo_kl_coef"] * x.abs() * held.view_as(m)


def geo_mean(lp, l_old, a, m, o, w=None):
    """[S]: one loss per sequence."""
    x = lp - l_old
    bounded = torch.clamp(x, -o["clip_ratio_low"], o["clip_ratio_high"])
    y = torch.where(a > 0, torch.minimum(x, bounded), torch.maximum(x, bounded))
    y = torch.where(a == 0, torch.zeros_like(y), y)
    n = m.sum(1).clamp(min=1)
    loss = -((a * m).sum(1) / n) * safe_exp((y * m).sum(1) / n)
    if w is not None:
        loss = loss * torch.exp((torch.where(m == 1, w, torch.ones_like(w)).log() * m).sum(1) / n)
    return loss


def agg(z, m, mode, norm):
    n, sequences = m.sum(1), (m.sum(1) > 0).sum()
    sums = (z * m).sum(1)
    return {
        "token-mean": lambda: sums.sum() / m.sum(),
        "token-sum": lambda: sums.sum(),
        "seq-mean-token-sum": lambda: sums.sum() / sequences,
        "seq-mean-token-sum-norm": lambda: sums.sum() / sequences / norm,
        "seq-mean-token-mean": lambda: (sums / n.clamp(min=1)).sum() / sequences,
    }[mode]()


def kl_value(name, lp, l_ref):
    d = lp - l_ref
    if name in ("k1", "kl"):
        return d
    if name == "abs":
        return d.abs()
    if name in ("k2", "mse"):
        return d**2 / 2
    v = torch.clamp(-d, -20, 20)
    return torch.clamp(v.exp() - v - 1, -10, 10)


def kl_loss(name, lp, l_ref, l_old):
    if not name.endswith("+"):
        return kl_value(name, lp, l_ref)
    k2, base = kl_value("k2", lp, l_ref), kl_value(name[:-1], lp, l_ref)
    return safe_exp(lp - l_old).detach() * (k2 - k2.detach() + base.detach())  # T32


# --- rollout correction -----------------------------------------------------------------------------------------


def rejection(u, m, rule, low, high):
    """Kept tokens [S, T] under one rule; for k1 the bounds are those of u (T33)."""
    c = torch.clamp(u, -20, 20)
    k = {"k1": c, "k2": c**2 / 2, "k3": c.exp() - 1 - c}[rule[-2:]]
    scope = rule[:-3]
    if scope == "token":
        s = k
    else:
        n = m.sum(1)
        masked = torch.where(m == 1, k, torch.full_like(k, -math.inf))
        s = {
            "seq_sum": (k * m).sum(1),
            "seq_mean": (k * m).sum(1) / n,
            "seq_max": masked.max(1).values,
        }[scope][:, None].expand_as(k)
    return ((s >= low) & (s <= high)).to(u.dtype) * m


def weights(u, m, keep, level, low, high, zero_outside, normalise):
    exponent = u if level == "token" else (u * m).sum(1, keepdim=True).expand_as(u)
    raw = safe_exp(exponent)
    w = (
        torch.where((raw >= low) & (raw <= high), raw, torch.zeros_like(raw))
        if zero_outside
        else raw.clamp(max=high)
    )
    w = w * keep
    if normalise and level == "token":
        w = w / (w.sum() / keep.sum())
    elif normalise:
        n = keep.sum(1)
        w = w / ((w.sum(1) / n.clamp(min=1)).sum() / (n > 0).sum())
    return w
