"""Calls of a user's function: by the names of its arguments, without or with autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from banyan import user_code
from banyan.errors import RunError, UserError

Values = dict[str, Any]
Call = Callable[[Values], Any]


def named(
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


def plain(call: Call, values: Values) -> Any:
    import torch

    with torch.no_grad():
        return call(values)


def derived(call: Call, values: Values, wanted: Sequence[str], grads: Sequence[Any]) -> tuple:
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


def add(total: Any, part: Any) -> None:
    if total is not None and part is not None:
        total.add_(part.to(total.dtype))
