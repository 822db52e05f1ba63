"""banyan: reinforcement learning of language models with every shared token computed once.

Importing this package loads neither torch nor the extension: `banyan --help` and configuration errors stay fast. The
extension comes with `from banyan import _C` (or banyan.extension.load, which explains failures); torch is loaded first
then, since it brings the libraries that the extension links. The library for trainers of one's own is `banyan.trie`,
`banyan.ops` and `banyan.transformers`, loaded when first named.
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import Any

# Threads that wait for each other spin for as long as lies between ops of a step, tens of microseconds, then sleep.
# OpenMP's default is to spin for milliseconds; where reward workers or other programs share the cores, the spinning
# thread holds the core that the waited-for one needs, and a step takes many times as long. Read by the runtime when
# torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def version() -> str:
    """Version of the installed distribution, or "source" where the package runs uninstalled."""
    try:
        return metadata.version("banyan-rl")
    except metadata.PackageNotFoundError:
        return "source"


def __getattr__(name: str) -> Any:
    if name not in ("_C", "trie", "ops", "transformers"):
        raise AttributeError(f"module 'banyan' has no attribute {name!r}")
    importlib.import_module("torch")
    return importlib.import_module(f"banyan.{name}")
