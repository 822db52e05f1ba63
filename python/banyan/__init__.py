"""banyan: reinforcement learning of language models with every shared token computed once.

Importing this package loads neither torch nor the extension: `banyan --help` and configuration errors stay fast. The
extension comes with `from banyan import _C` (or banyan.extension.load, which explains failures); torch is loaded first
then, since it brings the libraries that the extension links.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any


def version() -> str:
    """Version of the installed distribution, or "source" where the package runs uninstalled."""
    try:
        return metadata.version("banyan-rl")
    except metadata.PackageNotFoundError:
        return "source"


def __getattr__(name: str) -> Any:
    if name != "_C":
        raise AttributeError(f"module 'banyan' has no attribute {name!r}")
    importlib.import_module("torch")
    return importlib.import_module("banyan._C")
