"""The user's reward function, loaded as verl loads it, or the built-in scorer of each data source."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from banyan.errors import UserError
from banyan.reward import registry

_MODULE = "custom_module"  # verl's name: pickles and tracebacks of users show it

ComputeScore = Callable[..., Any]


def load(path: str | None, name: str, reward_kwargs: Mapping[str, Any]) -> ComputeScore:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`.

    Args:
        path: Python file of the user; None takes the built-in scorers.
        name: Function in that file, plain or `async`.
        reward_kwargs: Further keyword arguments of every call of it.

    Raises:
        UserError: [reward] for a file that is missing or has no such function. What the file itself
            raises while it is loaded is passed on.
    """
    if path is None:
        return _built_in
    function = functools.partial(_from_file(path, name), **reward_kwargs)
    if not inspect.iscoroutinefunction(function.func):
        return function
    return lambda **arguments: asyncio.run(function(**arguments))


def _from_file(path: str, name: str) -> ComputeScore:
    if not Path(path).is_file():
        raise UserError(f"[reward] reward.custom_reward_function.path: no such file: {path}")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise UserError(f"[reward] {path}: wanted a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"[reward] {path}: wanted a function {name}, which is missing")
    return function


def _built_in(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Any:
    return registry.find(data_source)(solution_str, ground_truth, extra_info)
