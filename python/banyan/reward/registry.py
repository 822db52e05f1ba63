"""Built-in scorers by the `data_source` of a row.

A scorer is a function `(solution_str, ground_truth, extra_info) -> number or mapping with "score"`
in a file of `banyan/reward/scorers/`, registered by the decorator:

    @scorer("openai/gsm8k")
    def compute_score(solution_str, ground_truth, extra_info): ...

A name that ends in `*` covers every data source that begins like it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from banyan.errors import UserError

Scorer = Callable[[str, Any, Mapping[str, Any]], Any]

_scorers: dict[str, Scorer] = {}


def scorer(*data_sources: str) -> Callable[[Scorer], Scorer]:
    """Registers the decorated function for `data_sources`. Raises ValueError for a name taken."""

    def register(function: Scorer) -> Scorer:
        for name in data_sources:
            if name in _scorers:
                raise ValueError(f"[reward] scorer {name!r}: wanted a new name, got one twice")
            _scorers[name] = function
        return function

    return register


def known() -> list[str]:
    """Data sources that have a built-in scorer."""
    _load()
    return sorted(_scorers)


def find(data_source: str) -> Scorer:
    """The scorer of `data_source`. Raises UserError [reward] with the known ones."""
    _load()
    if data_source in _scorers:
        return _scorers[data_source]
    for name, function in _scorers.items():
        if name.endswith("*") and data_source.startswith(name[:-1]):
            return function
    raise UserError(
        f"[reward] data_source {data_source!r}: wanted one of {', '.join(known())}, or your own "
        "function: reward.custom_reward_function.path=FILE.py"
    )


def _load() -> None:
    from banyan.reward import scorers

    for module in pkgutil.iter_modules(scorers.__path__):
        importlib.import_module(f"{scorers.__name__}.{module.name}")
