"""`banyan features [key=value ...]`: what each feature is here, whether a configuration turns it on, its switches.

Features of the user, which banyan.feature.modules names, stand at the end.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from banyan.config import features, schema, table
from banyan.config.resolve import Resolved, resolve
from banyan.trainer.main_ppo import add_config_arguments, check_config_path, trainer_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="a configuration, as in `banyan train`"
    )
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="a list of objects in place of a table")


def run(args: argparse.Namespace) -> int:
    check_config_path(args)
    name = args.config_name.removesuffix(".yaml")
    config = resolve(
        args.overrides,
        name,
        args.config_path,
        partial=True,
        trainer=trainer_of(name),
        load_features=True,
    )
    found = [*table_features(config), *user_features(config)]
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0


def table_features(config: Resolved) -> list[dict[str, Any]]:
    """The features of the table under a configuration."""
    return [
        {
            "name": row.name,
            "area": row.area,
            "level": row.level,
            "state": row.state(),
            "on": row.is_on(config.switches),
            "switches": {s.key: _value(s, config) for s in row.switches},
            "conflicts": list(row.conflicts),
            "requires": list(row.requires),
            "here": row.here(),
        }
        for row in features.rows().values()
    ]


def user_features(config: Resolved) -> list[dict[str, Any]]:
    """The features that the user registered."""
    run = config.features
    if run is None:
        return []
    needed = run.needed()
    return [
        {
            "name": name,
            "area": "yours",
            "level": feature.level,
            "state": "always on" if feature.level == 0 else "switch",
            "on": feature in needed,
            "switches": {
                f"banyan.feature.args.{argument}": value
                for argument, value, _ in run.args.describe(name)
            },
            "conflicts": list(feature.conflicts),
            "requires": list(feature.requires),
            "here": feature.text or (type(feature).__doc__ or "").strip().split("\n")[0],
        }
        for name, feature in run.features.items()
    ]


def _value(switch: features.Switch, config: Resolved) -> Any:
    """What the configuration says, or the default of the key."""
    if switch.key in config.switches:
        return config.switches[switch.key]
    if switch.key in schema.honoured():
        return schema.honoured()[switch.key].default
    text = switch.default if switch.default is not None else table.entries()[switch.key].default
    return text.split(" | ")[0]


def _print(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    view = Table(box=None, pad_edge=False)
    view.add_column("feature", no_wrap=True)
    view.add_column("level")
    view.add_column("state", no_wrap=True)
    view.add_column("here", overflow="fold")
    area = ""
    for feature in found:
        if feature["area"] != area:
            area = feature["area"]
            view.add_row(Text(area, style="bold"))
        state = feature["state"]
        if state == "switch":
            state = "switch, on" if feature["on"] else "switch, off"
        here = Text(feature["here"])
        for line in _details(feature):
            here.append("\n" + line, style="dim")
        view.add_row(Text(feature["name"]), str(feature["level"]), state, here)
    console.print(view)
    for letter, node in features.SHORT.items():
        console.print(Text(f"{letter}. is {node}", style="dim"))


def _details(feature: dict[str, Any]) -> list[str]:
    """Switches with their values, conflicts, requirements."""
    lines = [f"{_short(key)}={_show(value)}" for key, value in feature["switches"].items()]
    if feature["conflicts"]:
        lines.append("not with " + ", ".join(feature["conflicts"]))
    if feature["requires"]:
        lines.append("needs " + ", ".join(feature["requires"]))
    return lines


def _short(key: str) -> str:
    for letter, node in features.SHORT.items():
        if key.startswith(node):
            return f"{letter}.{key.removeprefix(node)}"
    return key


def _show(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
