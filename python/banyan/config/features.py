"""The table of features (feature_table.tsv): what each of MindSpeed's features is here, and the keys that it reads.

A switch whose only home is the table becomes a key of its own (`entries`); one that stands in a YAML or in a key table
is read there, and the feature follows it. So a feature is never said to be what its key is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from banyan.config import schema, table
from banyan.errors import UserError

FILE = "feature_table.tsv"
_ACTOR = "actor_rollout_ref.actor."
# Short names of nodes in the table, longest nodes first.
SHORT = {
    "O": _ACTOR + "megatron.override_transformer_config.",
    "M": _ACTOR + "megatron.",
    "F": _ACTOR + "fsdp_config.",
    "A": _ACTOR,
}
STATES = ("always on", "switch", "refused")


@dataclass(frozen=True)
class Switch:
    """One key of a feature."""

    key: str
    default: str | None  # None: the key stands elsewhere


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    level: int
    area: str
    written: str  # always | refused | key
    switches: tuple[Switch, ...]
    conflicts: tuple[str, ...]
    requires: tuple[str, ...]
    text: str

    def state(self) -> str:
        """One of STATES."""
        if self.written != "key":
            return "always on" if self.written == "always" else "refused"
        key = self.switches[0].key
        if key in schema.honoured():
            return "switch"
        return "refused" if table.entries()[key].state == "refused" else "always on"

    def here(self) -> str:
        """What it is here, with the reason of its key where that refuses it."""
        if self.written == "key" and self.state() == "refused":
            return f"{self.text}: {table.entries()[self.switches[0].key].reason}"
        return self.text

    def is_on(self, values: Mapping[str, Any]) -> bool:
        """Whether a configuration turns it on; `values` are all keys that it gives."""
        state = self.state()
        if state != "switch":
            return state == "always on"
        return any(
            switch.key in values and not _is_off(switch.key, values[switch.key])
            for switch in self.switches
        )


@cache
def rows() -> dict[str, Row]:
    """All features by name, in the order of the table."""
    text = resources.files("banyan.config").joinpath(FILE).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: dict[str, Row] = {}
    for line in lines[1:]:
        name, level, area, state, switches, conflicts, requires, here = line.split("\t")
        found[name] = Row(
            name,
            int(level),
            area,
            state,
            tuple(_switch(word) for word in _words(switches)),
            _words(conflicts),
            _words(requires),
            here,
        )
    return found


@cache
def entries() -> dict[str, table.Entry]:
    """The switches that stand in the table only, as keys."""
    return {
        switch.key: table.Entry(
            switch.key,
            "equivalent" if row.written == "always" else "refused",
            switch.default,
            row.text,
            f"switch of the feature {row.name}",
            FILE,
        )
        for row in rows().values()
        for switch in row.switches
        if switch.default is not None
    }


def given(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says about the switches of all features."""
    return {
        switch.key: leaves[switch.key]
        for row in rows().values()
        for switch in row.switches
        if switch.key in leaves
    }


def on(switches: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each feature is on, also under the names of its switches; `switches` as `given` returns them."""
    found: dict[str, bool] = {}
    for row in rows().values():
        is_on = row.is_on(switches)
        for switch in row.switches:
            found[switch.key.rsplit(".", 1)[-1].replace("_", "-")] = is_on
    return found | {row.name: row.is_on(switches) for row in rows().values()}


def check_relations(switches: Mapping[str, Any]) -> None:
    """Raises UserError for the first feature that is on with one that it excludes, or without one that it requires."""
    states = on(switches)
    for row in rows().values():
        if not states[row.name]:
            continue
        for other in row.conflicts:
            if states[other]:
                raise UserError(f"features {row.name} and {other} are incompatible")
        for other in row.requires:
            if not states[other]:
                raise UserError(f"feature {row.name} requires {other}, which is off")


def _is_off(key: str, value: Any) -> bool:
    """Sizes of one and what is false, empty or not set turn nothing on, nor does a default that is no flag."""
    if isinstance(value, bool):
        return not value
    if value in (None, 0, 1, "", "disable", "none"):
        return True
    return key in schema.honoured() and value == schema.honoured()[key].default


def _switch(word: str) -> Switch:
    name, separator, default = word.partition("=")
    node, _, leaf = name.partition(".")
    return Switch(SHORT[node] + leaf, default if separator else None)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
