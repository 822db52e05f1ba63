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

Shapes: src/banyan/ops/*.h. Without a backward, autograd takes the gradients of forward; rope, linear and embedding are
asked for gradients without the x of forward, so theirs must be given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from banyan import user_code
from banyan.errors import RunError, UserError, core_text

Values = dict[str, Any]
Call = Callable[[Values], Any]
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
}
_WITHOUT_X = ("rope", "linear", "embedding")


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
                f"feature {owner}: {slot}: wanted functions forward, {', '.join(wanted)}, got {name}"
            )
    if slot in _WITHOUT_X and len(given) < len(wanted):
        raise UserError(
            f"feature {owner}: {slot}: wanted {' and '.join(wanted)} beside forward: autograd has no x there"
        )
    calls = {
        name: _named(owner, slot, name, function, wanted[name]) for name, function in given.items()
    }
    return _MAKERS[slot](core.slots, _named(owner, slot, "forward", forward, _FORWARD[slot]), calls)


def _named(
    owner: str, slot: str, what: str, function: Callable[..., Any], names: Sequence[str]
) -> Call:
    """A call with named values that hands over those which the function names."""
    parameters = inspect.signature(function).parameters.values()
    missing = [
        p.name
        for p in parameters
        if p.name not in names
        and p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing:
        raise UserError(
            f"feature {owner}: {slot}: {what} wants {', '.join(missing)}; known arguments are {', '.join(names)}"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = (
        list(names)
        if takes_all
        else [name for name in names if name in {p.name for p in parameters}]
    )
    path = (
        Path(inspect.unwrap(function).__code__.co_filename)
        if hasattr(inspect.unwrap(function), "__code__")
        else Path()
    )

    def call(values: Values) -> Any:
        try:
            return function(**{name: values[name] for name in accepted})
        except (RunError, UserError):
            raise
        except Exception as error:
            raise RunError(
                f"feature {owner}: {slot}: {what} failed: {user_code.place(error, path)}"
            ) from error

    return call


def _plain(call: Call, values: Values) -> Any:
    import torch

    with torch.no_grad():
        return call(values)


def _derived(call: Call, values: Values, wanted: Sequence[str], grads: Sequence[Any]) -> tuple:
    """(gradients of `wanted`, outputs) of a function by autograd; `grads` are those of its outputs, None: of no use."""
    import torch

    with torch.enable_grad():
        leaves = {name: values[name].detach().requires_grad_() for name in wanted}
        out = call({**values, **leaves})
    outputs = out if isinstance(out, tuple) else (out,)
    pairs = [
        (o, g) for o, g in zip(outputs, grads, strict=False) if g is not None and o is not None
    ]
    if not any(o.requires_grad for o, _ in pairs):
        raise RunError(
            f"feature: wanted a result that depends on {', '.join(wanted)}, got a constant (was it detached?)"
        )
    pairs = [(o, g) for o, g in pairs if o.requires_grad]
    got = torch.autograd.grad(
        [o for o, _ in pairs],
        list(leaves.values()),
        [g.to(o.dtype) for o, g in pairs],
        allow_unused=True,
    )
    full = [
        g if g is not None else torch.zeros_like(values[n])
        for n, g in zip(wanted, got, strict=True)
    ]
    return full, [o.detach() if o is not None else None for o in outputs]


def _add(total: Any, part: Any) -> None:
    if total is not None and part is not None:
        total.add_(part.to(total.dtype))


def _swiglu(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_backward(dy, gate_up, options):
        values = {"dy": dy, "gate_up": gate_up}
        if "backward" in calls:
            return slots.SwigluGradients(_plain(calls["backward"], values), _plain(forward, values))
        (grad,), (y,) = _derived(forward, values, ["gate_up"], [dy])
        return slots.SwigluGradients(grad, y)

    return {
        "forward": lambda gate_up, options: _plain(forward, {"gate_up": gate_up}),
        "backward": op_backward,
    }


def _rms_norm(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_backward(dy, x, weight, eps, grad_weight, options, residual):
        values = {"dy": dy, "x": x, "weight": weight, "eps": eps}
        if "backward" in calls:
            dx, dweight = _plain(calls["backward"], values)
        else:
            (dx, dweight), _ = _derived(forward, values, ["x", "weight"], [dy])
        _add(grad_weight, dweight)
        return dx if residual is None else dx + residual

    return {
        "forward": lambda x, weight, eps, options: _plain(
            forward, {"x": x, "weight": weight, "eps": eps}
        ),
        "backward": op_backward,
    }


def _rope(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def with_first(call: Call, name: str) -> Callable[..., Any]:
        return lambda x, positions, cos, sin, options: _plain(
            call, {name: x, "positions": positions, "cos": cos, "sin": sin}
        )

    return {"forward": with_first(forward, "x"), "backward": with_first(calls["backward"], "dy")}


def _linear(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_forward(x, weight, bias, residual):
        y = _plain(forward, {"x": x, "weight": weight.tensor(), "bias": bias})
        return y if residual is None else y + residual

    def op_backward_weight(dy, x, grad_weight, grad_bias, options):
        result = _plain(calls["backward_weight"], {"dy": dy, "x": x})
        dweight, dbias = result if isinstance(result, tuple) else (result, None)
        if grad_bias is not None and dbias is None:
            raise RunError(
                "feature: linear: wanted dweight, dbias of a layer with a bias, got dweight"
            )
        _add(grad_weight, dweight)
        _add(grad_bias, dbias)

    return {
        "forward": op_forward,
        "backward_input": lambda dy, weight: _plain(
            calls["backward_input"], {"dy": dy, "weight": weight.tensor()}
        ),
        "backward_weight": op_backward_weight,
    }


def _embedding(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    return {
        "forward": lambda ids, weight: _plain(forward, {"ids": ids, "weight": weight.tensor()}),
        "backward": lambda dy, ids, grad: _add(
            grad, _plain(calls["backward"], {"dy": dy, "ids": ids, "num_rows": grad.size(0)})
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
        logprob, lse, entropy = _plain(forward, values_of(hidden, head, index, temperature))
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
            dhidden, dweight = _plain(calls["backward"], {**values, **grads})
        else:
            (dhidden, dweight), _ = _derived(
                forward, values, ["hidden", "weight"], [grad_logprob, None, grad_entropy]
            )
        _add(grad_head, dweight)
        return dhidden

    return {"forward": op_forward, "backward": op_backward}


def _value_head(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def op_backward(hidden, head, grad_value, grad_weight, grad_bias):
        values = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
        if "backward" in calls:
            dhidden, dweight, dbias = _plain(
                calls["backward"], {**values, "grad_value": grad_value}
            )
        else:
            wanted = ["hidden", "weight"] + (["bias"] if head.bias is not None else [])
            (dhidden, dweight, *rest), _ = _derived(forward, values, wanted, [grad_value])
            dbias = rest[0] if rest else None
        _add(grad_weight, dweight)
        _add(grad_bias, dbias)
        return dhidden

    return {
        "forward": lambda hidden, head: _plain(
            forward, {"hidden": hidden, "weight": head.weight, "bias": head.bias}
        ),
        "backward": op_backward,
    }


def _attention(slots: Any, forward: Call, calls: dict[str, Call]) -> Functions:
    def values_of(call) -> Values:
        return {name: getattr(call, name) for name in _FORWARD["attention"]}

    def op_forward(call):
        result = _plain(forward, values_of(call))
        return slots.AttentionResult(*(result if isinstance(result, tuple) else (result,)))

    def op_backward(call, grad_out, out, lse):
        values = values_of(call)
        if "backward" in calls:
            saved = {"grad_out": grad_out, "out": out, "lse": lse}
            grads = _plain(calls["backward"], {**values, **saved})
        else:
            grads, _ = _derived(forward, values, ["q", "k", "v"], [grad_out])
        return slots.AttentionSlotGradients(*grads)

    return {"forward": op_forward, "backward": op_backward}


_MAKERS: dict[str, Callable[[Any, Call, dict[str, Call]], Functions]] = {
    "attention": _attention,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "linear": _linear,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "value_head": _value_head,
}
