"""verl's keys that banyan does not honour: equivalent or refused, each with its reason. key_table.tsv holds those of
reinforcement learning, sft_key_table.tsv those of `banyan sft` and the trainers that extend it.

Layout of a file: comment lines (#), then `@name<TAB>text` for each reason, then a header and one key per line:
key, state, verl's default (" | " separates the defaults of its trainers), name of the reason, meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

# Defaults that stand for a whole node: every key below it is governed by the node's line.
_NODES = ("{}", "<node defaults>", "(copy of node)")
# The override nodes of the other roles have the keys of the actor's.
_OVERRIDE = "megatron.override_transformer_config."
_ROLES = ("actor_rollout_ref.ref.", "critic.")


@dataclass(frozen=True)
class Entry:
    """One key of verl that has no reader here."""

    name: str
    state: str  # equivalent | refused
    default: str
    reason: str
    meaning: str
    file: str = ""  # that it stands in

    def is_default(self, value: Any) -> bool:
        """True if `value` is verl's default, so that a refused key may carry it."""
        return any(same(value, text) for text in self.default.split(" | "))


def file_of(trainer: str) -> str:
    """The file with a trainer's keys."""
    return "key_table.tsv" if trainer == "ppo" else "sft_key_table.tsv"


@cache
def entries(trainer: str = "ppo") -> dict[str, Entry]:
    """All entries by key."""
    reasons: dict[str, str] = {}
    found: dict[str, Entry] = {}
    file = resources.files("banyan.config").joinpath(file_of(trainer))
    text = file.read_text(encoding="utf-8")
    for line in text.splitlines():
        cells = line.split("\t")
        if line.startswith("#") or cells[0] == "key":
            continue
        if line.startswith("@"):
            reasons[cells[0][1:]] = cells[1]
        else:
            name, state, default, reason, meaning = cells
            found[name] = Entry(name, state, default, reasons[reason], meaning, file.name)
    if trainer == "ppo":
        from banyan.config import features  # which reads the keys of this file

        found |= features.entries()
    return found


def find(name: str, trainer: str = "ppo") -> Entry | None:
    """The entry of a key, or of the free-form node above it."""
    table = entries(trainer)
    if name in table:
        return table[name]
    for role in _ROLES:
        if name.startswith(role + _OVERRIDE):
            return table.get("actor_rollout_ref.actor." + name.removeprefix(role))
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        entry = table.get(".".join(parts[:length]))
        if entry is not None:
            return entry if entry.default in _NODES else None
    return None


@cache
def sections(trainer: str = "ppo") -> frozenset[str]:
    """Names of verl's inner nodes."""
    return frozenset(
        name.rsplit(".", d)[0] for name in entries(trainer) for d in range(1, name.count(".") + 1)
    )


def same(value: Any, text: str) -> bool:
    """True if `value` is what `text` reads as in YAML."""
    if text in _NODES:
        return value is None or value == {}
    ours, theirs = _number_or_self(value), _number_or_self(_load(text))
    return ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)


def _load(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # e.g. [lm_head, *mlp.gate]: a pattern, not an alias
        return text


def _number_or_self(value: Any) -> Any:
    """Numbers as float, so that 1, 1.0, "1e-06" and "1" compare; texts of true and false as they read."""
    if isinstance(value, str):
        value = _load(value) if value else value
    if isinstance(value, bool) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
