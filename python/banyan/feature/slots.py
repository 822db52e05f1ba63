"""What a feature does to operator slots: one replacement, wrappers in order.

A replacement is a function on tensors (feature/ops.py has the arguments of each slot); its backward is given too, or
taken by autograd. A wrapper is given the op inside and returns one with the same functions:

    def counted(inner):
        def forward(*args):
            count()
            return inner.forward(*args)
        return inner.with_functions(forward=forward)

Inside a wrapper the functions have the arguments of the core, which are to be passed on as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from banyan.errors import UserError

if TYPE_CHECKING:
    import torch


class Op:
    """The functions of an op by name: forward, backward; linear has backward_input and backward_weight."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = dict(functions)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        functions = self.__dict__.get("functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(f"an op with {', '.join(functions)} has no {name}")

    def with_functions(self, **functions: Callable[..., Any]) -> Op:
        """The same op with some of its functions replaced. Raises UserError for an unknown name."""
        for name in functions:
            if name not in self.functions:
                raise UserError(
                    f"feature: wanted functions of {', '.join(self.functions)}, got '{name}'"
                )
        return Op({**self.functions, **functions})


class Slots:
    """The slots as one owner sees them. Nothing takes effect before `apply`; the registry calls it."""

    def __init__(self, owner: str, core: Any = None) -> None:
        """`owner` names the feature in messages; `core` is banyan._C, loaded if None."""
        from banyan import extension

        self.owner = owner
        self._core = core or extension.load()

    def names(self) -> list[str]:
        """All slots."""
        return self._core.slots.names()

    def replace(
        self,
        slot: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        *,
        force: bool = False,
        **parts: Callable[..., Any],
    ) -> None:
        """Registers an op in place of the original.

        Args:
            slot: Its name.
            forward: The function; its arguments are those of feature/ops.py that it names.
            backward: Gradients; None takes them by autograd, where the slot allows it.
            force: Replace another owner's replacement.
            parts: For slots whose backward comes in parts: linear has backward_input and backward_weight.

        Raises:
            UserError: An unknown slot, a second replacement, or a function with other arguments.
        """
        from banyan.feature import ops

        functions = ops.adapt(self._core, self.owner, slot, forward, backward, parts)
        self._checked(self._core.slots.replace, slot, self.owner, functions, force)

    def wrap(self, slot: str, wrapper: Callable[[Op], Op], name: str = "") -> bool:
        """Registers a wrapper; the first one is innermost. False if the owner has one of that name there.

        Raises:
            UserError: An unknown slot.
        """
        label = name or wrapper.__name__

        def call(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
            made = wrapper(Op(functions))
            if not isinstance(made, Op):
                raise UserError(
                    f"feature {self.owner}: {slot}: wanted {label} to return an op "
                    f"(inner.with_functions(...)), got {type(made).__name__}"
                )
            return made.functions

        return self._checked(self._core.slots.wrap, slot, self.owner, label, call)

    def remove_wrapper(self, slot: str, name: str) -> None:
        """Takes out the wrappers of that name. Raises UserError if there is none."""
        self._checked(self._core.slots.remove_wrapper, slot, name)

    def remove(self) -> int:
        """Takes out all that this owner registered; how many entries that were."""
        return self._core.slots.remove(self.owner)

    def apply(self) -> bool:
        """Puts what is registered into force: now, or (False) when the step under way has ended."""
        return self._core.slots.apply()

    def dump(self) -> list[str]:
        """A line per slot that is changed."""
        return self._core.slots.dump()

    def _checked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        from banyan.errors import core_text

        try:
            return function(*arguments)
        except ValueError as error:
            raise UserError(core_text(error)) from error


@contextmanager
def applied(*features: Any, core: Any = None) -> Iterator[Any]:
    """Features in force for a `with` block, outside a configured run; yields their registry."""
    from banyan import extension
    from banyan.feature.registry import Registry

    registry = Registry([f() if isinstance(f, type) else f for f in features], {})
    registry.prepare()
    registry.start(core or extension.load())
    try:
        yield registry
    finally:
        registry.stop()


def ancestor_mask(parent: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Which keys each query of an attention call attends: itself and all tokens that lead to it.

    Args:
        parent: [C + T] int32, as attention gets it.
        num_queries: T.

    Returns:
        [T, C + T] bool.
    """
    import torch

    total = parent.numel()
    mask = torch.eye(total, dtype=torch.bool)
    for token, before in enumerate(parent.tolist()):
        if before >= 0:
            mask[token] |= mask[before]
    return mask[total - num_queries :]
