"""GSM8K from its authors' JSONL to verl's columns, with verl's preprocessing (docs/guides/your_own_data.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from banyan.errors import UserError

DATA_SOURCE = "openai/gsm8k"
_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")


def convert(path: Path, split: str) -> list[dict[str, Any]]:
    """Rows of verl's columns. Raises UserError naming file and line of a row that is not GSM8K's."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            rows.append(_row(_parse(line, path, number), split, len(rows)))
    if not rows:
        raise UserError(f"{path}: wanted lines with question and answer, got an empty file")
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: wanted UTF-8, got a byte that is not at offset {error.start}"
        ) from error


def _parse(line: str, path: Path, number: int) -> tuple[str, str, str]:
    """Question, answer text and final answer of one line."""
    try:
        row = json.loads(line)
        question, answer = row["question"], row["answer"]
        match = _ANSWER.search(answer)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}:{number}: wanted an object with question and answer as text"
        ) from error
    if not match or not isinstance(question, str):
        raise UserError(f"{path}:{number}: wanted an answer that ends in '#### number'")
    return question, answer, match.group(1).replace(",", "")


def _row(parsed: tuple[str, str, str], split: str, index: int) -> dict[str, Any]:
    question, answer, truth = parsed
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }
