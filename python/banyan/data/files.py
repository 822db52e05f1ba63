"""Files of rows: parquet, json and jsonl, read with the place of every row and written back.

A place is `file:line` in jsonl and `file row N` (from 1) elsewhere; error messages name it. A name that begins with
`arithmetic:` stands for generated rows (arithmetic.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from banyan.data import arithmetic
from banyan.errors import UserError

_FORMATS = (".parquet", ".json", ".jsonl")
Row = dict[str, Any]


def read_rows(name: str | Path, kinds: tuple[type, ...] = (dict,)) -> Iterator[tuple[str, Any]]:
    """Yields (place, row) in order; where a row is not of `kinds` (objects), a text that says so stands in its place.

    Raises UserError if the file is missing, of another format, or not readable as a whole.
    """
    if str(name).startswith(arithmetic.PREFIX):
        for number, row in enumerate(arithmetic.from_name(str(name)), start=1):
            yield f"{name} row {number}", row
        return
    path = Path(name)
    if path.suffix not in _FORMATS:
        raise UserError(f"{path}: wanted a file ending in {', '.join(_FORMATS)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path, kinds)
        else:
            for number, row in enumerate(_read_whole(path), start=1):
                yield f"{path} row {number}", _kept(row, kinds)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def write_rows(path: Path, rows: list[Row]) -> None:
    """Writes rows as parquet, json or jsonl, as the name ends. Raises UserError if that fails."""
    if path.suffix not in _FORMATS:
        raise UserError(f"{path}: wanted a name ending in {', '.join(_FORMATS)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        else:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def _read_jsonl(path: Path, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            place = f"{path}:{number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield place, _kept(json.loads(text), kinds)
            except UnicodeDecodeError:
                yield place, "wanted UTF-8, got other bytes"
            except ValueError as error:
                yield place, f"wanted a JSON object, got: {error}"


def _read_whole(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as error:
            raise UserError(f"{path}: not a parquet file: {str(error).splitlines()[0]}") from error
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: wanted a list of rows, got {type(rows).__name__}")
    return rows


def _kept(row: Any, kinds: tuple[type, ...]) -> Any:
    return row if isinstance(row, kinds) else f"wanted an object, got {type(row).__name__}"
