"""Every parameter of config/rollout_table.tsv as an option of a command, under each of its names.

The options are collected as they stand and read by rollout_table, which alone knows what they mean.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from banyan.config import rollout_table
from banyan.config.rollout_table import Row

_DEST = "engine_flags"


class _Keep(argparse.Action):
    """Appends the flag and its value to the namespace's list."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        kept = list(getattr(namespace, _DEST, []))
        kept.append(option_string)
        if isinstance(values, str):
            kept.append(values)
        setattr(namespace, _DEST, kept)


def add(parser: argparse.ArgumentParser, taken: Iterable[str]) -> None:
    """Adds the options; names in `taken` are the command's own."""
    group = parser.add_argument_group(
        "model and engine", "vLLM's and SGLang's names; docs/guides/rollout_parameters.md has all"
    )
    parser.set_defaults(**{_DEST: []})
    _hint_at_near_names(parser)
    skipped = set(taken)
    for name, row in rollout_table.names("banyan").items():
        if name in skipped:
            continue
        own = name == row.name and row.effect in ("honoured", "map")
        words = row.type.removeprefix("one of ").split(", ") if "one of" in row.type else None
        group.add_argument(
            _flag(name),
            action=_Keep,
            dest=argparse.SUPPRESS,
            nargs="?" if row.type == "bool" else None,
            choices=words,
            metavar=None if words else _metavar(row),
            help=_help(row) if own else argparse.SUPPRESS,
        )
        if row.type == "bool":
            group.add_argument(
                _flag(f"no_{name}"),
                action=_Keep,
                dest=argparse.SUPPRESS,
                nargs=0,
                help=argparse.SUPPRESS,
            )


def read(args: argparse.Namespace) -> dict[str, Any]:
    """The given options by name. Raises UserError."""
    return rollout_table.from_flags(getattr(args, _DEST))


def _hint_at_near_names(parser: argparse.ArgumentParser) -> None:
    """An unknown option is told with the nearest known one."""
    plain = parser.error

    def error(message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        near = (
            difflib.get_close_matches(unknown[1], parser._option_string_actions, 1)
            if unknown
            else []
        )
        plain(message + (f"; the nearest known option is {near[0]}" if near else ""))

    parser.error = error  # type: ignore[method-assign]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(row: Row) -> str:
    if row.type == "bool":
        return "true|false"
    kind = row.type.split(" ")[0]
    return {"str": "TEXT", "strs": "A,B", "size": "SIZE", "int": "N"}.get(kind, "X")


def _help(row: Row) -> str:
    default = "" if row.default is None else f" (default: {str(row.default).lower()})"
    return f"{row.meaning}{default}".replace("%", "%%")
