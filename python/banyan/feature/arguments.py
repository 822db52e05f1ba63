"""What features read and may change: the configuration by its dotted keys, and their own arguments by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from banyan.errors import UserError

ARGS_KEY = "banyan.feature.args"
LEVEL_KEY = "banyan.feature.optimization_level"
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
}


@dataclass
class _Argument:
    kind: type
    value: Any
    help: str
    choices: list[Any] | None
    owner: str


class Arguments:
    """Keys of the configuration (`args["actor_rollout_ref.rollout.n"]`) and arguments of features (`args.my_scale`).

    Values of the user come from `banyan.feature.args`; a name there that no feature added is an error.
    """

    def __init__(self, values: MutableMapping[str, Any], given: Mapping[str, Any] | None = None):
        """`values` are the resolved keys, changed in place; `given` are banyan.feature.args."""
        self._values = values
        self._given = dict(given or {})
        self._added: dict[str, _Argument] = {}
        self._owner = ""

    @property
    def optimization_level(self) -> int:
        """Features of a higher level are not applied."""
        return self._values.get(LEVEL_KEY, 2)

    def add(
        self,
        name: str,
        kind: type = bool,
        default: Any = None,
        help: str = "",
        choices: Iterable[Any] | None = None,
    ) -> None:
        """Adds an argument; its value is what `banyan.feature.args.NAME` says, or the default.

        Raises:
            UserError: Another feature added it, or the value has another type or is no choice.
        """
        if kind not in _KINDS:
            raise UserError(
                f"feature {self._owner}: argument {name}: wanted a type of {', '.join(k.__name__ for k in _KINDS)}, "
                f"got {kind!r}"
            )
        known = self._added.get(name)
        if known is not None and known.owner != self._owner:
            raise UserError(
                f"feature {self._owner}: argument {name}: wanted a name of its own, got one of feature {known.owner}"
            )
        chosen = list(choices) if choices is not None else None
        self._added[name] = _Argument(kind, default, help, chosen, self._owner)
        if name in self._given:
            self._added[name].value = self._checked(name, self._given[name])

    def add_choice(self, name: str, value: Any) -> None:
        """Adds a value to an argument with choices; nothing happens if it is there."""
        choices = self._find(name).choices
        if choices is None:
            raise UserError(f"feature {self._owner}: argument {name}: wanted one with choices")
        if value not in choices:
            choices.append(value)

    def check(self) -> None:
        """Raises UserError for the first name or choice of the user that does not exist."""
        for name in self._given:
            self._find(name)
        for name, argument in self._added.items():
            if argument.choices is not None and argument.value not in [None, *argument.choices]:
                raise UserError(
                    f"{ARGS_KEY}.{name}: wanted one of {', '.join(map(str, argument.choices))}, got {argument.value}"
                )

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key or argument, or `default` where there is none."""
        if name in self._added:
            return self._added[name].value
        return self._values.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self._values[name] if name in self._values else self._find(name).value

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._values:
            self._values[name] = value
        else:
            self._find(name).value = value

    def __contains__(self, name: str) -> bool:
        return name in self._added or name in self._values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._added:
            return self._added[name].value
        raise AttributeError(f"no feature added the argument {name}")

    def overlay(self, overrides: Mapping[str, Any]) -> None:
        """Sets several values, as `Registry.repatch` does."""
        for name, value in overrides.items():
            if name in self._added:
                value = self._checked(name, value)
            self[name] = value

    def describe(self, owner: str) -> list[tuple[str, Any, str]]:
        """(name, value, help) of the arguments that a feature added."""
        return [(n, a.value, a.help) for n, a in self._added.items() if a.owner == owner]

    def speak_for(self, owner: str) -> None:
        """Whose hook runs from now on; for messages."""
        self._owner = owner

    def _checked(self, name: str, value: Any) -> Any:
        kind = self._added[name].kind
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if kind is float and is_number:
            value = float(value)
        fits = isinstance(value, kind) and (kind is not int or is_number)
        if value is not None and not fits:
            raise UserError(f"{ARGS_KEY}.{name}: wanted {_KINDS[kind]}, got {value}")
        return value

    def _find(self, name: str) -> _Argument:
        if name in self._added:
            return self._added[name]
        near = difflib.get_close_matches(name, self._added, n=1)
        known = ", ".join(self._added) or "none"
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UserError(
            f"{ARGS_KEY}.{name}: wanted an argument of a loaded feature ({known}), got '{name}'{hint}"
        )
