"""`banyan config show [key=value ...]` prints the resolved tree, `banyan config explain KEY` what a key means."""

from __future__ import annotations

import argparse
from typing import Any

from banyan.config import arguments, rollout_table, schema, table
from banyan.errors import UserError
from banyan.trainer.main_ppo import add_config_arguments, resolve_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True)
    show = verbs.add_parser("show", help="print the resolved tree as YAML")
    show.add_argument(
        "overrides", nargs="*", metavar="key=value", help="verl's keys, as in `banyan train`"
    )
    add_config_arguments(show)
    explain = verbs.add_parser("explain", help="print meaning, default and home of a key")
    explain.add_argument(
        "keys", nargs="+", metavar="KEY", help="key, or a section such as actor_rollout_ref.rollout"
    )


def run(args: argparse.Namespace) -> int:
    if args.what == "show":
        import yaml

        config = resolve_arguments(args, partial=True)
        for note in config.notes:
            print(f"# {note}")
        print(yaml.safe_dump(config.tree, sort_keys=False, allow_unicode=True), end="")
    else:
        print("\n\n".join(explain(key) for key in args.keys))
    return 0


def explain(name: str) -> str:
    """What a key means to the trainers that have it. Raises UserError for an unknown one."""
    trainers = [file.removesuffix("_trainer") for file in schema.TRAINERS]
    for describe in (_honoured, _section, _unread, _engine_parameter):
        texts = [text for trainer in trainers if (text := describe(name, trainer))]
        if texts:
            return "\n".join(dict.fromkeys(texts))
    raise UserError(arguments.unknown(name))


def _honoured(name: str, trainer: str) -> str | None:
    key = schema.honoured(trainer).get(name)
    if key is None:
        return None
    header = "config" if trainer == "ppo" else "finetune_config"
    home = f"the core (src/banyan/core/{header}.h)" if key.reader == "core" else "the shell"
    return (
        f"{name}\n  {key.meaning}\n  type: {key.spec.wanted()}\n  default: {_show(key.default)}\n"
        f"  honoured by {home}; stands in conf/{key.file}"
    )


def _section(name: str, trainer: str) -> str | None:
    below = [other for other in schema.honoured(trainer) if other.startswith(name + ".")]
    if not below:
        return None
    return "\n".join(
        [f"{name}: a section; honoured keys below it:", *(f"  {other}" for other in below)]
    )


def _unread(name: str, trainer: str) -> str | None:
    entry = table.find(name, trainer)
    if entry is None:
        return None
    state = (
        "refused unless it has verl's default"
        if entry.state == "refused"
        else "equivalent: accepted, without effect"
    )
    return (
        f"{name}\n  {entry.meaning}\n  verl's default: {entry.default}\n  {state}: {entry.reason}\n"
        f"  stands in config/{entry.file}"
    )


def _engine_parameter(name: str, trainer: str) -> str | None:
    """A name below engine_kwargs, or by itself."""
    node, _, leaf = name.rpartition(".")
    engine = node.removeprefix("actor_rollout_ref.rollout.engine_kwargs.") or "banyan"
    known = rollout_table.names(engine) if engine in rollout_table.DIALECTS else {}
    row = known.get(leaf.replace("-", "_"))
    if row is None or trainer != "ppo":
        return None
    effect = {
        "honoured": "honoured",
        "map": "converted",
        "ignore": "without effect: accepted and said once",
        "reject": f"refused unless it is {_show(row.default)}",
    }[row.effect]
    home = row.tree_key()
    return (
        f"{name}\n  {row.meaning}\n  type: {row.type}\n  default here: {_show(row.default)}; theirs: {row.theirs}\n"
        f"  {effect}{f', sets {home}' if home else ''}; stands in config/rollout_table.tsv"
    )


def _show(value: Any) -> str:
    if value == "???":
        return "none, must be given"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
