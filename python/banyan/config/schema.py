"""The honoured keys: ppo_trainer.yaml read with its comments.

A key's meaning stands in the comment lines above it; the comment behind its value says who reads it (core or shell)
and its type (config/types.py). So meaning, type, reader and default have one home.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from banyan.config import types


@dataclass(frozen=True)
class Key:
    """One honoured key."""

    name: str
    reader: str  # core | shell
    spec: types.Spec
    default: Any  # as written: "???" must be given, "${...}" points to another key
    meaning: str


@cache
def honoured() -> dict[str, Key]:
    """All honoured keys by name, in the order of the file. Raises ValueError if a key lacks its comments."""
    text = resources.files("banyan.conf").joinpath("ppo_trainer.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, Key] = {}
    for name, node in _leaves(yaml.compose(text, Loader=yaml.SafeLoader), ""):
        found[name] = _read_key(name, node, lines)
    return found


def sections() -> set[str]:
    """Names of the inner nodes ("actor_rollout_ref.actor.optim", ...)."""
    return {
        name.rsplit(".", depth)[0] for name in honoured() for depth in range(1, name.count(".") + 1)
    }


def _leaves(node: yaml.Node, prefix: str):
    for key_node, value_node in node.value:
        name = f"{prefix}{key_node.value}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, name + ".")
        else:
            yield name, value_node


def _read_key(name: str, node: yaml.Node, lines: list[str]) -> Key:
    row = node.start_mark.line
    reader, _, spec = lines[row].partition(" # ")[2].strip().partition(" ")
    meaning: list[str] = []
    above = row - 1
    while above >= 0 and lines[above].lstrip().startswith("#"):
        meaning.insert(0, lines[above].lstrip()[1:].strip())
        above -= 1
    if reader not in ("core", "shell") or not meaning:
        raise ValueError(f"{name}: wanted its meaning above and '# core|shell type' behind it")
    return Key(name, reader, types.parse(spec.strip()), _plain(node), " ".join(meaning))


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node, Dumper=yaml.SafeDumper))
