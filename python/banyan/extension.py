"""Loads the C++ core `banyan._C` and says clearly why it cannot be loaded."""

from __future__ import annotations

from typing import Any

from banyan.errors import UserError


def load() -> Any:
    """The extension module. Raises UserError if it is not built, or built for another torch."""
    import torch  # first: it brings the libraries that the extension links

    try:
        from banyan import _C
    except ImportError as error:
        raise UserError(
            f"banyan._C cannot be loaded ({error}); build it with `pip install .` or `make build`, "
            f"with torch {torch.__version__} installed"
        ) from error
    built, running = _release(_C.torch_version), _release(torch.__version__)
    if built != running:
        raise UserError(
            f"banyan._C was built for torch {built}, but torch {running} is installed; build it again"
        )
    return _C


def _release(version: str) -> str:
    """2.13.0+cpu -> 2.13.0: the build's suffix names a device, not an interface."""
    return version.split("+")[0]
