"""Files of the user: loading them, and the line of theirs where an error arose."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path
from types import ModuleType

from banyan.errors import UserError


def load_file(key: str, path: Path) -> ModuleType:
    """Runs a Python file as a module of its own.

    Raises:
        UserError: It is no Python file, or what runs in it fails; names the key and the line.
    """
    spec = importlib.util.spec_from_file_location(f"banyan_user_{path.stem}", path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise UserError(f"{key}: {path}: wanted a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{key}: {path} cannot be loaded: {place(error, path)}") from error
    return module


def place(error: BaseException, path: Path) -> str:
    """The error with the line of the user's file where it arose."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
