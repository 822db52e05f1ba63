"""banyan: reinforcement learning of language models with every shared token computed once.

Importing this package loads neither torch nor the extension: `banyan --help` and configuration errors stay fast.
"""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Version of the installed distribution, or "source" where the package runs uninstalled."""
    try:
        return metadata.version("banyan-rl")
    except metadata.PackageNotFoundError:
        return "source"
