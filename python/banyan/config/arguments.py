"""Command-line arguments in Hydra's grammar, made safe before Hydra sees them.

Hydra adds whatever `+a.typo=2` names, and refuses `k=v` for a key that its YAML does not hold, though verl's does. So
every argument is checked against the known keys first, and `k=v`, `+k=v` and `++k=v` all become `++k=v`. Config
groups (`+recipe=NAME`) pass as they are; `~k` is carried out after composition.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from banyan.config import schema, sharing, spellings, table
from banyan.errors import UserError

_ARGUMENT = re.compile(r"^(?P<prefix>\+\+|\+|~)?(?P<key>[^=\s]+?)(?P<value>=.*)?$", re.DOTALL)
# A resolver evaluates text (environment, code); plain ${a.b} and oc.select only copy another value.
RESOLVER = re.compile(r"\$\{\s*(?!oc\.select\b)[A-Za-z_][\w.]*:")
_GROUPS_OF_VERL = {"ppo": ("model_engine",)}
_GROUPS_OF_SFT = ("engine", "optim", "model_engine")  # engine=fsdp


@dataclass
class Arguments:
    """Arguments as Hydra gets them, and what is done beside it."""

    overrides: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def normalise(
    arguments: list[str], config_dir: Path | None = None, trainer: str = "ppo"
) -> Arguments:
    """Checks names and forms of all arguments. Raises UserError for the first that is wrong."""
    result = Arguments()
    groups = config_groups(config_dir)
    for argument in arguments:
        match = _ARGUMENT.match(argument)
        if not match or (match["value"] is None and match["prefix"] != "~"):
            raise UserError(f"{argument}: wanted key=value, +key=value, ++key=value or ~key")
        key, value = match["key"], match["value"]
        if key.split("@")[0].split("/")[0] in groups:
            result.overrides.append(argument)
        elif key.startswith("hydra."):
            result.notes.append(
                f"{argument}: Hydra's own options have no effect; files go to trainer.default_local_dir"
            )
        elif key in _GROUPS_OF_VERL.get(trainer, _GROUPS_OF_SFT):
            result.notes.append(f"{argument}: equivalent, banyan has one engine")
        elif not is_known(key, trainer):
            raise UserError(unknown(key, trainer))
        elif match["prefix"] == "~":
            result.removed.append(key)
        else:
            _check_value(key, value[1:])
            result.overrides.append(f"++{key}{value}")
    return result


def is_known(key: str, trainer: str = "ppo") -> bool:
    """True for a honoured key, a key of verl's table, a section of either, or anything below a free-form one."""
    key = spellings.verls(key)
    honoured = schema.honoured(trainer)
    if key in honoured or key in schema.sections(trainer) or key in table.sections(trainer):
        return True
    if (trainer == "ppo" and sharing.is_key(key)) or table.find(key, trainer) is not None:
        return True
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(1, len(parts)))
    return any(name in honoured and honoured[name].spec.type == "map" for name in above)


def unknown(key: str, trainer: str = "ppo") -> str:
    """The error line for a key that nobody knows, with the nearest known name."""
    honoured = schema.honoured(trainer)
    known = [*honoured, *table.entries(trainer)]
    leaf = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not near:
        near = [name for name in honoured if name.rsplit(".", 1)[-1] == leaf][:1]
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = (
        f"; the nearest known key is {near[0]}" if near else "; `banyan config show` lists the keys"
    )
    return f"{key}: unknown key{hint}"


def config_groups(config_dir: Path | None) -> set[str]:
    """Names of config groups: the folders beside the configuration files, shipped and the user's."""
    groups = {"recipe"}
    if config_dir is not None:
        groups |= {path.name for path in config_dir.iterdir() if path.is_dir()}
    return groups


def _check_value(key: str, value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if RESOLVER.search(value):
        raise UserError(
            f"{key}: wanted a plain value or ${{another.key}}, got {value!r}; resolvers are not evaluated"
        )
    try:
        override = OverridesParser.create().parse_override(f"++{key}={value}")
    except HydraException as error:
        raise UserError(
            f"{key}: cannot read {value!r}; quote special characters, as in {key}='\"...\"'"
        ) from error
    if override.is_sweep_override():
        raise UserError(
            f"{key}: wanted one value, got the sweep {value!r}; for a list write [{value}]"
        )
