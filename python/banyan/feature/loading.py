"""Features of a configuration: the files and modules that it names, and what they register."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from banyan import user_code
from banyan.errors import UserError
from banyan.feature.arguments import ARGS_KEY
from banyan.feature.base import Feature
from banyan.feature.registry import Registry, collecting, registered

MODULES_KEY = "banyan.feature.modules"
EXTERNAL_KEYS = ("actor_rollout_ref.model.external_lib", "model.external_lib")
_of_module: dict[str, dict[str, Feature]] = {}  # an import runs once


def load(values: Mapping[str, Any]) -> list[Feature]:
    """Features registered in this process and by the files and modules that a configuration names.

    Raises:
        UserError: A file or module is missing or fails; two features have one name.
    """
    found = {feature.feature_name(): feature for feature in registered()}
    for key in (MODULES_KEY, *EXTERNAL_KEYS):
        for name in _names(values.get(key)):
            for feature in _load_one(key, name).values():
                if feature.feature_name() in found:
                    raise UserError(
                        f"{key}: {name}: feature {feature.feature_name()}: wanted a name of its own; "
                        "there is one of that name"
                    )
                found[feature.feature_name()] = feature
    return list(found.values())


def sources(values: Mapping[str, Any]) -> dict[str, str]:
    """A digest of each file that a configuration loads, by its name: all ranks of a run must have the same."""
    found = {}
    for key in (MODULES_KEY, *EXTERNAL_KEYS):
        for name in _names(values.get(key)):
            file = (
                name if name.endswith(".py") else getattr(sys.modules.get(name), "__file__", None)
            )
            if file is not None:
                content = Path(file).expanduser().read_bytes()
                found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def registry(values: dict[str, Any], others: Mapping[str, bool]) -> Registry:
    """The features of a run; `others` are those of the table and whether each is on."""
    made = Registry(load(values), values, values.get(ARGS_KEY), others)
    made.sources = sources(values)
    return made


@contextmanager
def in_force(run: Registry | None, core: Any, server_urls: Any, say: Any) -> Iterator[None]:
    """The features of a run in force for a `with` block; says which slots are changed.

    Raises:
        UserError: Servers generate, which compute with their own ops.
    """
    if run is None or not run.needed():
        yield
        return
    lines = run.start(core)
    try:
        if lines and server_urls:
            raise UserError(
                f"actor_rollout_ref.rollout.server_urls: wanted none with changed slots ({'; '.join(lines)}): "
                "a server computes with its own ops"
            )
        for line in lines:
            say(f"slot {line}{_note(line)}")
        yield
    finally:
        run.stop()


def _note(line: str) -> str:
    slot = line.split(":")[0]
    if slot == "cross_entropy":
        return " (training and scoring; the rollout draws from the head's own logits)"
    return "" if slot == "value_head" else " (the rollout runs op by op, not in one native pass)"


def _load_one(key: str, name: str) -> dict[str, Feature]:
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"{key}: wanted a Python file or module, got {name}: no such file")
        with collecting() as found:
            user_code.load_file(key, path)
        return found
    if name not in _of_module:
        with collecting() as found:
            try:
                importlib.import_module(name)
            except Exception as error:
                raise UserError(
                    f"{key}: {name} cannot be imported: {type(error).__name__}: {error}"
                ) from error
        _of_module[name] = found
    return _of_module[name]


def _names(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
