"""Losses and advantages that the user writes as Python functions.

`actor_rollout_ref.actor.policy_loss.loss_mode=FILE.py:NAME` and `algorithm.adv_estimator=FILE.py:NAME` name a
function; docs/guides/your_own_algorithm.md says what it gets and returns. A function takes the arguments that it
names, and only those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from banyan import user_code
from banyan.config.resolve import Resolved
from banyan.errors import RunError, UserError

LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
ADVANTAGE_KEY = "algorithm.adv_estimator"

_ARGUMENTS = {
    LOSS_KEY: (
        "log_prob",
        "old_log_prob",
        "advantages",
        "response_mask",
        "weights",
        "ref_log_prob",
        "entropy",
        "offsets",
        "config",
    ),
    ADVANTAGE_KEY: (
        "token_level_rewards",
        "index",
        "scores",
        "values",
        "old_log_probs",
        "weights",
        "components",
        "config",
    ),
}

Function = Callable[..., Any]


def load(config: Resolved) -> dict[str, Function]:
    """The user's functions of a configuration, by key; empty if it names none.

    Args:
        config: A resolved configuration.

    Raises:
        UserError: A file or function is missing, cannot be loaded, or wants an argument that there is not.
    """
    return {
        key: _from_file(key, config[key]) for key in (LOSS_KEY, ADVANTAGE_KEY) if ":" in config[key]
    }


def register(core: Any, config: Resolved, functions: Mapping[str, Function]) -> None:
    """Hands loaded functions to the core (`banyan._C`) under the names of the configuration.

    Calls of them raise RunError with the function's name and line for whatever goes wrong inside.
    """
    for key, function in functions.items():
        name = config[key]
        if key == LOSS_KEY:
            call = _guarded(key, name, function, _loss)
            core.set_user_loss(name, call, "weights" in _accepted(key, function))
        else:
            core.set_user_advantage(name, _guarded(key, name, function, _advantages))


def _from_file(key: str, name: str) -> Function:
    path_text, _, function_name = name.rpartition(":")
    path = Path(path_text).expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{key}: wanted FILE.py:FUNCTION, got {name}: no such file: {path}")
    module = user_code.load_file(key, path)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{key}: wanted a function {function_name} in {path}, which is missing")
    missing = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in _ARGUMENTS[key]
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if missing:
        raise UserError(
            f"{key}: {name} wants {', '.join(missing)}; known arguments are {', '.join(_ARGUMENTS[key])}"
        )
    return function


def _accepted(key: str, function: Function) -> list[str]:
    """Arguments that the function names; all of them if it takes **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(_ARGUMENTS[key])
    return [parameter.name for parameter in parameters if parameter.name in _ARGUMENTS[key]]


def _guarded(
    key: str, name: str, function: Function, convert: Callable[[Any, Mapping[str, Any]], Any]
) -> Callable[[Mapping[str, Any]], Any]:
    accepted = _accepted(key, function)

    def call(arguments: Mapping[str, Any]) -> Any:
        try:
            result = function(**{argument: arguments[argument] for argument in accepted})
            return convert(result, arguments)
        except Exception as error:
            path = Path(name.rpartition(":")[0]).expanduser()
            raise RunError(f"{key}: {name} failed: {user_code.place(error, path)}") from error

    return call


def _loss(result: Any, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """(loss, metrics) from a loss, or a loss and a dict of metrics."""
    value, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(value, type(arguments["log_prob"])):
        raise TypeError(f"wanted a tensor with one loss per token, got {type(value).__name__}")
    return value, {name: float(figure) for name, figure in metrics.items()}


def _advantages(
    result: Any, arguments: Mapping[str, Any]
) -> tuple[list[list[float]], list[list[float]]]:
    """(advantages, returns) from a list of advantages (then both are the same), or a pair of lists."""
    lengths = [len(row) for row in arguments["token_level_rewards"]]
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and all(isinstance(part, (list, tuple)) for part in result):
        return _rows(result[0], lengths), _rows(result[1], lengths)
    rows = _rows(result, lengths)
    return rows, rows


def _rows(values: Sequence[Any], lengths: Sequence[int]) -> list[list[float]]:
    """Lists of floats; a number stands for every token of its response."""
    rows = []
    for place, value in enumerate(values):
        row = value.tolist() if hasattr(value, "tolist") else value
        length = lengths[place] if place < len(lengths) else 1
        rows.append([float(row)] * length if isinstance(row, (int, float)) else list(row))
    return rows
