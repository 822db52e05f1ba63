"""Functions of the user as ops of the core.

A function takes the arguments of its slot that it names, and only those:

    attention      forward   q, k, v, parent, scale, layer -> out, or out and lse
                   backward  those, grad_out, out, lse -> dq, dk, dv
    rms_norm       forward   x, weight, eps -> y
                   backward  those, dy -> dx, dweight
    rope           forward   x, positions, cos, sin -> y
                   backward  dy, positions, cos, sin -> dx
    swiglu         forward   gate_up -> y
                   backward  dy, gate_up -> d(gate_up)
    linear         forward   x, weight, bias -> y
                   backward_input   dy, weight -> dx
                   backward_weight  dy, x -> dweight, or dweight and dbias
    embedding      forward   ids, weight -> x
                   backward  dy, ids, num_rows -> dweight
    cross_entropy  forward   hidden, weight, row_offsets, token, temperature -> logprob, lse, entropy
                   backward  those, grad_logprob, grad_entropy, lse -> dhidden, dweight
    value_head     forward   hidden, weight, bias -> values
                   backward  those, grad_value -> dhidden, dweight, dbias
    router         forward   h, weight, num_chosen -> logits (h times weight), choice
    grouped_gemm   forward   x, offsets, weights -> y
                   backward_input   dy, offsets, weights -> dx
                   backward_weight  dy, x, offsets -> dweights
    permute        forward   x, token -> rows
    unpermute      forward   y, slot, weight -> x

Shapes: src/banyan/ops/*.h. Without a backward, autograd takes the gradients of forward; rope, linear and embedding are
asked for gradients without the x of forward, so theirs must be given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from banyan.errors import RunError, UserError, core_text
from banyan.feature.calls import Call, Values, add, derived, named, plain

Functions = dict[str, Callable[..., Any]]

_FORWARD: dict[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "parent", "scale", "layer"),
    "rms_norm": ("x", "weight", "eps"),
    "rope": ("x", "positions", "cos", "sin"),
    "swiglu": ("gate_up",),
    "linear": ("x", "weight", "bias"),
    "embedding": ("ids", "weight"),
    "cross_entropy": ("hidden", "weight", "row_offsets", "token", "temperature"),
    "value_head": ("hidden", "weight", "bias"),
    "router": ("h", "weight", "num_chosen"),
    "grouped_gemm": ("x", "offsets", "weights"),
    "permute": ("x", "token"),
    "unpermute": ("y", "slot", "weight"),
}
_BACKWARD: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {"backward": (*_FORWARD["attention"], "grad_out", "out", "lse")},
    "rms_norm": {"backward": ("dy", *_FORWARD["rms_norm"])},
    "rope": {"backward": ("dy", "positions", "cos", "sin")},
    "swiglu": {"backward": ("dy", "gate_up")},
    "linear": {"backward_input": ("dy", "weight"), "backward_weight": ("dy", "x")},
    "embedding": {"backward": ("dy", "ids", "num_rows")},
    "cross_entropy": {
        "backward": (*_FORWARD["cross_entropy"], "grad_logprob", "grad_entropy", "lse")
    },
    "value_head": {"backward": (*_FORWARD["value_head"], "grad_value")},
    "router": {},
    "grouped_gemm": {
        "backward_input": ("dy", "offsets", "weights"),
        "backward_weight": ("dy", "x", "offsets"),
    },
    "permute": {},
    "unpermute": {},
}
_WITHOUT_X = ("rope", "linear", "embedding", "grouped_gemm")


def adapt(
    core: Any,
    owner: str,
    slot: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None,
    parts: Mapping[str, Callable[..., Any]],
) -> Functions:
    """The functions of the op, as core.slots.replace wants them. Raises UserError for what does not fit."""
    try:
        core.slots.check(slot)
    except ValueError as error:
        raise UserError(core_text(error)) from error
    if slot not in _FORWARD:
        names = ", ".join(_FORWARD)
        raise UserError(
            f"feature {owner}: {slot}: wanted a slot that takes functions ({names}), got one for wrappers only"
        )
    given: dict[str, Callable[..., Any]] = dict(parts)
    if backward is not None:
        given["backward"] = backward
    wanted = _BACKWARD[slot]
    for name in given:
        if name not in wanted:
            raise UserError(
                f"feature {owner}: {slot}: wanted functions {', '.join(('forward', *wanted))}, got {name}"
            )
    if slot in _WITHOUT_X and len(given) < len(wanted):
        raise UserError(
            f"feature {owner}: {slot}: wanted {' and '.join(wanted)} beside forward: autograd has no x there"
        )
    calls = {
        name: named(owner, slot, name, function, wanted[name]) for name, function in given.items()
    }
    return _MAKERS[slot](core.slots, named(owner, slot, "forward", forward, _FORWARD[slot]), calls)


def _swiglu(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_backward(dy, gate_up, options):
        values = {"dy": dy, "gate_up": gate_up}
        if "backward" in calls:
            return slots.SwigluGradients(plain(calls["backward"], values), plain(forward, values))
        (grad,), (y,) = derived(forward, values, ["gate_up"], [dy])
        return slots.SwigluGradients(grad, y)

    return {
        "forward": lambda gate_up, options: plain(forward, {"gate_up": gate_up}),
        "backward": op_backward,
    }


def _rms_norm(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_backward(dy, x, weight, eps, grad_weight, options, residual):
        values = {"dy": dy, "x": x, "weight": weight, "eps": eps}
        if "backward" in calls:
            dx, dweight = plain(calls["backward"], values)
        else:
            (dx, dweight), _ = derived(forward, values, ["x", "weight"], [dy])
        add(grad_weight, dweight)
        return dx if residual is None else dx + residual

    return {
        "forward": lambda x, weight, eps, options: plain(
            forward, {"x": x, "weight": weight, "eps": eps}
        ),
        "backward": op_backward,
    }


def _rope(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def with_first(call: Call, name: str) -> Callable[..., Any]:
        return lambda x, positions, cos, sin, options: plain(
            call, {name: x, "positions": positions, "cos": cos, "sin": sin}
        )

    return {"forward": with_first(forward, "x"), "backward": with_first(calls["backward"], "dy")}


def _linear(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_forward(x, weight, bias, residual):
        y = plain(forward, {"x": x, "weight": weight.tensor(), "bias": bias})
        return y if residual is None else y + residual

    def op_backward_weight(dy, x, grad_weight, grad_bias, options):
        result = plain(calls["backward_weight"], {"dy": dy, "x": x})
        dweight, dbias = result if isinstance(result, tuple) else (result, None)
        if grad_bias is not None and dbias is None:
            raise RunError(
                "feature: linear: wanted dweight, dbias of a layer with a bias, got dweight"
            )
        add(grad_weight, dweight)
        add(grad_bias, dbias)

    return {
        "forward": op_forward,
        "backward_input": lambda dy, weight: plain(
            calls["backward_input"], {"dy": dy, "weight": weight.tensor()}
        ),
        "backward_weight": op_backward_weight,
    }


def _embedding(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    return {
        "forward": lambda ids, weight: plain(forward, {"ids": ids, "weight": weight.tensor()}),
        "backward": lambda dy, ids, grad: add(
            grad, plain(calls["backward"], {"dy": dy, "ids": ids, "num_rows": grad.size(0)})
        ),
    }


def _cross_entropy(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def values_of(hidden, head, index, temperature) -> Values:
        return {
            "hidden": hidden,
            "weight": head.tensor(),
            "row_offsets": index.row_offsets,
            "token": index.token,
            "temperature": temperature,
        }

    def op_forward(hidden, head, index, temperature, with_entropy, options, memory):
        logprob, lse, entropy = plain(forward, values_of(hidden, head, index, temperature))
        return slots.EdgeLogprob(logprob, lse, entropy if with_entropy else None)

    def op_backward(
        hidden,
        head,
        index,
        saved,
        grad_logprob,
        grad_entropy,
        temperature,
        grad_head,
        options,
        memory,
    ):
        values = values_of(hidden, head, index, temperature)
        if "backward" in calls:
            grads = {"grad_logprob": grad_logprob, "grad_entropy": grad_entropy, "lse": saved.lse}
            dhidden, dweight = plain(calls["backward"], {**values, **grads})
        else:
            (dhidden, dweight), _ = derived(
                forward, values, ["hidden", "weight"], [grad_logprob, None, grad_entropy]
            )
        add(grad_head, dweight)
        return dhidden

    return {"forward": op_forward, "backward": op_backward}


def _value_head(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_backward(hidden, head, grad_value, grad_weight, grad_bias):
        values = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
        if "backward" in calls:
            dhidden, dweight, dbias = plain(calls["backward"], {**values, "grad_value": grad_value})
        else:
            wanted = ["hidden", "weight"] + (["bias"] if head.bias is not None else [])
            (dhidden, dweight, *rest), _ = derived(forward, values, wanted, [grad_value])
            dbias = rest[0] if rest else None
        add(grad_weight, dweight)
        add(grad_bias, dbias)
        return dhidden

    return {
        "forward": lambda hidden, head: plain(
            forward, {"hidden": hidden, "weight": head.weight, "bias": head.bias}
        ),
        "backward": op_backward,
    }


def _attention(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def values_of(call) -> Values:
        return {name: getattr(call, name) for name in _FORWARD["attention"]}

    def op_forward(call):
        result = plain(forward, values_of(call))
        return slots.AttentionResult(*(result if isinstance(result, tuple) else (result,)))

    def op_backward(call, grad_out, out, lse):
        values = values_of(call)
        if "backward" in calls:
            saved = {"grad_out": grad_out, "out": out, "lse": lse}
            grads = plain(calls["backward"], {**values, **saved})
        else:
            grads, _ = derived(forward, values, ["q", "k", "v"], [grad_out])
        return slots.AttentionSlotGradients(*grads)

    return {"forward": op_forward, "backward": op_backward}


def _router(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_forward(h, weight, router, options):
        values = {"h": h, "weight": weight.tensor(), "num_chosen": router.num_chosen}
        return slots.Routing(*plain(forward, values))

    return {"forward": op_forward}


def _grouped_gemm(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def with_first(call: Call, name: str) -> Callable[..., Any]:
        return lambda x, offsets, weights: plain(
            call, {name: x, "offsets": offsets, "weights": [w.tensor() for w in weights]}
        )

    def op_backward_weight(dy, x, offsets, grads, options):
        values = {"dy": dy, "x": x, "offsets": offsets}
        for grad, part in zip(grads, plain(calls["backward_weight"], values), strict=True):
            add(grad, part)

    return {
        "forward": with_first(forward, "x"),
        "backward_input": with_first(calls["backward_input"], "dy"),
        "backward_weight": op_backward_weight,
    }


def _permute(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    return {"forward": lambda x, rows: plain(forward, {"x": x, "token": rows.token})}


def _unpermute(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_forward(y, rows, weight, residual, options):
        x = plain(forward, {"y": y, "slot": rows.slot, "weight": weight})
        return x if residual is None else x + residual

    return {"forward": op_forward}


_MAKERS: dict[str, Callable[[Any, Call, dict[str, Call]], Functions]] = {
    "attention": _attention,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "linear": _linear,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "value_head": _value_head,
    "router": _router,
    "grouped_gemm": _grouped_gemm,
    "permute": _permute,
    "unpermute": _unpermute,
}
