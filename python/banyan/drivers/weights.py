"""Folders with the actor's weights for servers to load: a fresh one for each version, so that no server can mistake an
old file for a new one. The one before the newest stays until the newest is loaded everywhere.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from banyan.errors import RunError, core_text

Save = Callable[[str, str, str], None]  # (directory, config_from, dtype)


class WeightFolders:
    """Writes and forgets them."""

    def __init__(self, root: Path, config_from: str, dtype: str) -> None:
        self._root = root
        self._config_from = config_from
        self._dtype = dtype
        self._written: list[Path] = []

    @property
    def newest(self) -> str | None:
        return str(self._written[-1]) if self._written else None

    def write(self, save: Save, version: int) -> str:
        """Has the present weights saved as an HF directory; its absolute path."""
        folder = self._root / f"version_{version:06d}_{uuid.uuid4().hex[:8]}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._written.append(folder.resolve())
            save(str(folder), self._config_from, self._dtype)
        except OSError as error:
            raise RunError(f"weights for the rollout servers: {core_text(error)}") from error
        return str(folder.resolve())

    def forget_all_but(self, keep: str | None) -> None:
        for folder in [folder for folder in self._written if str(folder) != keep]:
            shutil.rmtree(folder, ignore_errors=True)
            self._written.remove(folder)
