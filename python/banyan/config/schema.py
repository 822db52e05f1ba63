"""The honoured keys of a trainer: its YAML read with its comments.

A key's meaning stands in the comment lines above it; the comment behind its value says who reads it (core or shell)
and its type (config/types.py). So meaning, type, reader and default have one home. A trainer is named by its file:
`ppo` for ppo_trainer.yaml; a file whose `defaults` name another one adds to its keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from banyan.config import types

TRAINERS = ("ppo_trainer", "sft_trainer", "dpo_trainer")


@dataclass(frozen=True)
class Key:
    """One honoured key."""

    name: str
    reader: str  # core | shell
    spec: types.Spec
    default: Any  # as written: "???" must be given, "${...}" points to another key
    meaning: str
    file: str  # under conf/


@cache
def honoured(trainer: str = "ppo") -> dict[str, Key]:
    """All honoured keys by name, in the order of the file. Raises ValueError if a key lacks its comments."""
    file = resources.files("banyan.conf").joinpath(f"{trainer}_trainer.yaml")
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, Key] = {}
    for name, node in _leaves(yaml.compose(text, Loader=yaml.SafeLoader), ""):
        if name == "defaults":
            for base in _plain(node):
                found |= {} if base == "_self_" else honoured(base.removesuffix("_trainer"))
        else:
            found[name] = _read_key(name, node, lines, file.name)
    return found


def sections(trainer: str = "ppo") -> set[str]:
    """Names of the inner nodes ("actor_rollout_ref.actor.optim", ...)."""
    names = honoured(trainer)
    return {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}


def _leaves(node: yaml.Node, prefix: str):
    for key_node, value_node in node.value:
        name = f"{prefix}{key_node.value}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, name + ".")
        else:
            yield name, value_node


def _read_key(name: str, node: yaml.Node, lines: list[str], file: str) -> Key:
    row = node.start_mark.line
    reader, _, spec = lines[row].partition(" # ")[2].strip().partition(" ")
    meaning: list[str] = []
    above = row - 1
    while above >= 0 and lines[above].lstrip().startswith("#"):
        meaning.insert(0, lines[above].lstrip()[1:].strip())
        above -= 1
    if reader not in ("core", "shell") or not meaning:
        raise ValueError(f"{name}: wanted its meaning above and '# core|shell type' behind it")
    return Key(name, reader, types.parse(spec.strip()), _plain(node), " ".join(meaning), file)


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node, Dumper=yaml.SafeDumper))
