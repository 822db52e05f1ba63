"""`banyan completion SHELL`: prints what makes a shell complete commands, options, files and configuration keys."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from banyan.config import schema
from banyan.errors import UserError

_SHELLS = ("bash", "zsh", "fish", "tcsh")
_DIRECTORIES = {"--model", "--config-path", "--config-dir"}
# Commands with key=value arguments -> the trainer whose keys they are.
_TRAINERS = {"train": "ppo", "config": "ppo", "sft": "sft", "dpo": "dpo", "reward-model": "dpo"}
# bash puts a space behind a completion; a key is followed by its value.
_BASH_END = """
_banyan_complete() {
  _shtab_banyan "$@"
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o bashdefault -F _banyan_complete banyan"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS)


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise UserError("wanted the package shtab: pip install shtab") from error
    text = shtab.complete(whole_parser(shtab), shell=args.shell)
    print(text + _BASH_END if args.shell == "bash" else text)
    return 0


def whole_parser(shtab: Any) -> argparse.ArgumentParser:
    """One parser of all commands, with what each argument completes to."""
    from banyan.cli.main import VERBS

    parser = argparse.ArgumentParser(prog="banyan")
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    verbs = parser.add_subparsers(dest="verb")
    for verb, (module, summary) in VERBS.items():
        own = verbs.add_parser(verb, help=summary, description=summary)
        importlib.import_module(module).add_arguments(own)
        _describe(own, verb, shtab)
    return parser


def _describe(parser: argparse.ArgumentParser, verb: str, shtab: Any) -> None:
    """Sets `complete`, which shtab reads, on arguments that are paths or configuration keys."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _describe(inner, verb, shtab)
        elif action.dest in ("overrides", "keys") and verb in _TRAINERS:
            action.complete = _keys(_TRAINERS[verb])  # type: ignore[attr-defined]
        elif action.type is Path:
            is_directory = not _DIRECTORIES.isdisjoint(action.option_strings)
            action.complete = shtab.DIRECTORY if is_directory else shtab.FILE  # type: ignore[attr-defined]


def _keys(trainer: str) -> dict[str, Any]:
    """The honoured keys of a trainer; the script carries them, so that completing starts no Python."""
    words = " ".join(schema.honoured(trainer))
    name = f"_banyan_keys_{trainer}"
    return {
        "bash": name,
        "zsh": name,
        "fish": f"({name})",
        "preamble": {
            "bash": f"{name}() {{\n  compgen -S = -W '{words}' -- \"$1\"\n}}",
            "zsh": f"{name}() {{\n  compadd -S = -- {words}\n}}",
            "fish": f"function {name}\n  printf '%s=\\n' {words}\nend",
        },
    }
