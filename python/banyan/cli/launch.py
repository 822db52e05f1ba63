"""`banyan launch --ray ADDRESS -- train KEY=VALUE ...`: the processes of a run, placed on a Ray cluster."""

from __future__ import annotations

import argparse
import difflib

from banyan.errors import UserError

_COMMANDS = ("train", "sft", "dpo", "reward-model")
_MACHINES, _DEVICES_OF_ONE = "trainer.nnodes", "trainer.n_gpus_per_node"
_ROLLOUT = "actor_rollout_ref.rollout"
_DEVICES = ("cpu", "cuda", "npu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray",
        required=True,
        metavar="ADDRESS",
        help="of a running cluster: auto, HOST:PORT or ray://...; local: one of this machine, for this run",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes (default: trainer.nnodes times trainer.n_gpus_per_node of the command, and those of rollout)",
    )
    parser.add_argument(
        "--cpus-per-rank", type=int, default=1, metavar="N", help="processors and threads of each"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help=f"one of {', '.join(_COMMANDS)}, with its arguments",
    )


def run(args: argparse.Namespace) -> int:
    from banyan.launch import on_ray

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command or command[0] not in _COMMANDS:
        got = repr(command[0]) if command else "nothing"
        near = difflib.get_close_matches(command[0], _COMMANDS, 1) if command else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"[launch] after --: wanted one of {', '.join(_COMMANDS)}, got {got}{hint}")
    ranks = _at_least_1("--ranks", args.ranks if args.ranks is not None else _ranks_of(command))
    cpus = _at_least_1("--cpus-per-rank", args.cpus_per_rank)
    device = _value(command, "trainer.device") or "cpu"
    if device not in _DEVICES:
        raise UserError(
            f"[launch] trainer.device: wanted one of {', '.join(_DEVICES)}, got {device!r}"
        )
    return on_ray.run(args.ray, command, ranks, cpus, device, lambda line: print(line, flush=True))


def _ranks_of(command: list[str]) -> int:
    """Those that train, and those that only generate."""
    devices = _number(command, _DEVICES_OF_ONE, 1)
    ranks = _number(command, _MACHINES, 1) * devices
    generating = _number(command, f"{_ROLLOUT}.nnodes", 0)
    return ranks + generating * _number(command, f"{_ROLLOUT}.n_gpus_per_node", devices)


def _number(command: list[str], key: str, default: int) -> int:
    text = _value(command, key)
    try:
        return int(text) if text is not None else default
    except ValueError:
        raise UserError(f"[launch] {key}: wanted a number >= 1, got {text!r}") from None


def _value(command: list[str], key: str) -> str | None:
    """Of KEY=VALUE in the command, the last one as with Hydra."""
    found = None
    for argument in command[1:]:
        name, is_given, value = argument.partition("=")
        if is_given and name.lstrip("+") == key:
            found = value
    return found


def _at_least_1(what: str, number: int) -> int:
    if number < 1:
        raise UserError(f"[launch] {what}: wanted a number >= 1, got {number}")
    return number
