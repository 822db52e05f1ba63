"""Writes the tables of docs/guides/rollout_parameters.md from python/banyan/config/rollout_table.tsv.

python tools/rollout_parameters.py           rewrites the part between the two marks
python tools/rollout_parameters.py --check   exit code 1 if it is not what the table says
"""

from __future__ import annotations

import sys
from pathlib import Path

from banyan.config.rollout_table import Row, rows

GUIDE = Path(__file__).resolve().parent.parent / "docs/guides/rollout_parameters.md"
BEGIN = "<!-- from rollout_table.tsv: tools/rollout_parameters.py -->"
END = "<!-- end -->"
_WORDS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "banyan": "banyan"}
_PARTS = (
    ("honoured", "Honoured: the same meaning", True),
    ("map", "Converted", True),
    ("ignore", "Without effect: accepted and said once", False),
    ("reject", "Refused, unless it has this value", False),
)


def tables() -> str:
    """All rows, one table per effect."""
    parts = []
    for effect, title, with_default in _PARTS:
        found = [row for row in rows().values() if row.effect == effect]
        columns = ["name", "of"]
        columns += ["default here", "theirs", "key of a training run"] if with_default else []
        columns += ["value"] if effect == "reject" else []
        columns += ["what it does" if with_default else "why"]
        lines = [f"### {title}", "", _line(columns), _line(["---"] * len(columns))]
        lines += [_line(_cells(row, with_default)) for row in found]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(row: Row, with_default: bool) -> list[str]:
    others = ", ".join(f"`{name}`" for _, name in dict.fromkeys(row.aliases))
    name = f"`{row.name}`" + (f" ({others})" if others else "")
    engines = [*row.of, *(engine for engine, _ in row.aliases)]
    cells = [name, ", ".join(_WORDS[engine] for engine in dict.fromkeys(engines))]
    if with_default:
        key = row.tree_key()
        shown = "" if row.default is None else f"`{_show(row.default)}`"
        cells += [shown, row.theirs, f"`{key}`" if key else ""]
    elif row.effect == "reject":
        cells.append(f"`{_show(row.default)}`")
    return [*cells, row.meaning]


def _show(value: object) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(text: str) -> str:
    """The guide with fresh tables."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main() -> int:
    text = GUIDE.read_text(encoding="utf-8")
    fresh = page(text)
    if "--check" in sys.argv:
        if fresh != text:
            print(f"{GUIDE}: not what rollout_table.tsv says; run tools/rollout_parameters.py")
        return int(fresh != text)
    GUIDE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
