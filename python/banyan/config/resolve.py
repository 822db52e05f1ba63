"""Arguments and YAML files -> one checked tree of the honoured keys.

Order: names of the arguments (arguments.py), composition by Hydra, then every leaf of the composed tree: a honoured
key is checked against its type, an equivalent one is noted, a refused one must have verl's default, any other is an
error. What remains goes to the core and is never changed again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from banyan.config import (
    arguments,
    checks,
    features,
    finetune_checks,
    rollout,
    schema,
    sharing,
    spellings,
    table,
    types,
)
from banyan.errors import UserError
from banyan.feature import loading
from banyan.feature.registry import Registry


@dataclass(frozen=True)
class Resolved:
    """The configuration of a run."""

    tree: dict[str, Any]  # nested, honoured keys only
    notes: list[str] = field(
        default_factory=list
    )  # what is said once: equivalents and renamed keys
    switches: dict[str, Any] = field(default_factory=dict)  # keys of features that were given
    features: Registry | None = None  # the user's; None: they were not asked for

    def __getitem__(self, name: str) -> Any:
        """Value of a dotted key."""
        node: Any = self.tree
        for part in name.split("."):
            node = node[part]
        return node


def resolve(
    argv: list[str],
    config_name: str = "ppo_trainer",
    config_dir: Path | None = None,
    environ: Mapping[str, str] | None = None,
    partial: bool = False,
    trainer: str = "ppo",
    load_features: bool | None = None,
) -> Resolved:
    """Composes and checks the configuration.

    Args:
        argv: arguments in Hydra's grammar.
        config_name: name of the YAML file, without its ending.
        config_dir: folder of the user's own YAML files; the shipped ones can be named in their `defaults`.
        environ: environment variables, os.environ if None.
        partial: keep keys without a value as None and skip checks between keys (`banyan config show`).
        trainer: whose keys these are: ppo, sft or dpo.
        load_features: load the user's features and run their checks; None: unless `partial`.

    Raises:
        UserError: one line naming the key, what was wanted and what came.
    """
    args = arguments.normalise(argv, config_dir, trainer)
    tree = _compose(args.overrides, config_name, config_dir)
    leaves = dict(_leaves(tree, "", schema.honoured(trainer)))
    notes = args.notes
    if trainer == "ppo":
        notes += spellings.apply(leaves)
        notes += sharing.apply(leaves, os.environ if environ is None else environ)
    switches = features.given(leaves)
    notes += _check_unread(leaves, args.removed, trainer)
    values = _check_honoured(leaves, args.removed, partial, trainer)
    rules = _rules(trainer)
    if trainer == "ppo":
        notes += rollout.apply(values)
    notes += rules.rename(values)

    def check_rules() -> None:
        if not partial:
            rules.check_between_keys(values)

    registry = None
    if load_features if load_features is not None else not partial:
        registry = loading.registry(values, features.on(switches))
        features.check_relations(switches)
        registry.prepare(check_rules)
    else:
        check_rules()
    return Resolved(_nest(values), notes, switches, registry)


def defaults() -> dict[str, Any]:
    """The tree of all honoured keys with their defaults; None where a value must be given."""
    return resolve([], environ={}, partial=True).tree


def _compose(overrides: list[str], config_name: str, config_dir: Path | None) -> dict[str, Any]:
    """Hydra's composition as a plain tree; interpolations carried out, resolvers refused."""
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    GlobalHydra.instance().clear()
    if config_dir is None:
        context = initialize_config_module(config_module="banyan.conf", version_base="1.3")
    else:
        context = initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3")
        overrides = ["hydra.searchpath=[pkg://banyan.conf]", *overrides]
    try:
        with context:
            config = compose(config_name=config_name, overrides=overrides)
        _refuse_resolvers(OmegaConf.to_container(config, resolve=False), "")
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError("configuration: " + " ".join(lines[:4])) from error


def _refuse_resolvers(node: Any, name: str) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            _refuse_resolvers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, list):
        for value in node:
            _refuse_resolvers(value, name)
    elif isinstance(node, str) and arguments.RESOLVER.search(node):
        raise UserError(
            f"{name}: wanted a plain value or ${{another.key}}, got {node!r}; resolvers are not evaluated"
        )


def _rules(trainer: str) -> Any:
    """The module with the rules between the keys of a trainer."""
    return checks if trainer == "ppo" else finetune_checks


def _leaves(node: dict[str, Any], prefix: str, honoured: dict[str, schema.Key]):
    """(key, value) of every leaf; a honoured mapping and an empty node are leaves."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        known = honoured.get(name)
        if isinstance(value, dict) and value and (known is None or known.spec.type != "map"):
            yield from _leaves(value, name + ".", honoured)
        else:
            yield name, value


def _check_unread(leaves: dict[str, Any], removed: list[str], trainer: str) -> list[str]:
    """Takes equivalent and refused keys out of `leaves`; returns what is to be said."""
    said: dict[str, list[str]] = {}
    honoured = schema.honoured(trainer)
    for name in [name for name in leaves if name not in honoured]:
        value = leaves.pop(name)
        entry = table.find(name, trainer)
        if entry is None:
            _check_section(name, value, trainer)
        elif entry.state == "equivalent":
            said.setdefault(entry.reason, []).append(f"{name}={_show(value)}")
        elif not entry.is_default(value):
            raise UserError(f"{name}: wanted {entry.default}, got {_show(value)}: {entry.reason}")
    for name in removed:
        if name not in honoured and table.find(name, trainer) is None:
            raise UserError(f"~{name}: a section cannot be removed")
    return [f"{', '.join(names)}: equivalent, {reason}" for reason, names in said.items()]


def _check_section(name: str, value: Any, trainer: str) -> None:
    if name not in schema.sections(trainer) and name not in table.sections(trainer):
        raise UserError(arguments.unknown(name, trainer))
    if value is not None and value != {}:
        raise UserError(f"{name}: wanted keys below it (it is a section), got {_show(value)}")


def _check_honoured(
    leaves: dict[str, Any], removed: list[str], partial: bool, trainer: str
) -> dict[str, Any]:
    """Types and ranges of all honoured keys, in the order of the YAML."""
    values: dict[str, Any] = {}
    rules = _rules(trainer)
    for name, key in schema.honoured(trainer).items():
        value = None if name in removed else leaves.get(name, "???")
        if value == "???":
            if not partial:
                raise UserError(
                    f"{name}: wanted {key.spec.wanted()}, got nothing; it has no default"
                )
            values[name] = None
            continue
        try:
            value = rules.alias(name, value)
            at_default = partial and value == key.default
            values[name] = value if at_default else types.check(key.spec, value)
        except ValueError as error:
            raise UserError(
                f"{name}: wanted {error}, got {_show(value)}{rules.hint(name, value)}"
            ) from error
    return values


def _show(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, leaf = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree
