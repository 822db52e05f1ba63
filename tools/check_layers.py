"""Checks that folders of src/banyan include only what stands below them.

The order is ARCHITECTURE.md section 2, lowest first; folders on one line do not include each other. Tests
(`*_test.cpp`, `*_bench.cpp`) may also include `testing/`, and `testing/` may include anything. A private
header `detail/` is for its own folder. Exit status 1 and one line per offence otherwise.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LAYERS: list[set[str]] = [
    {"core"},
    {"feature", "trie", "kernels", "io"},
    {"ops"},
    {"parallel"},
    {"nn"},
    {"models"},
    {"rollout", "algo", "optim"},
    {"checkpoint"},
    {"train"},
    {"bench"},
]
TORCH_FREE = {"trie"}
INCLUDE = re.compile(r'^\s*#include\s+["<]([^">]+)[">]', re.MULTILINE)


def rank(folder: str) -> int:
    for index, layer in enumerate(LAYERS):
        if folder in layer:
            return index
    raise SystemExit(
        f"tools/check_layers.py: folder src/banyan/{folder} has no layer; add it to LAYERS"
    )


def offences(root: Path) -> list[str]:
    found = []
    for path in sorted([*root.rglob("*.h"), *root.rglob("*.cpp")]):
        folder = path.relative_to(root).parts[0]
        if folder == "testing":
            continue
        is_test = path.stem.endswith(("_test", "_bench"))
        for target in INCLUDE.findall(path.read_text(encoding="utf-8")):
            where = f"{path.relative_to(root.parent.parent)}: includes {target}"
            if folder in TORCH_FREE and target.startswith(("ATen/", "torch/", "c10/")):
                found.append(f"{where}, but {folder}/ is torch-free")
            if target.startswith("torch/extension") or target == "torch/torch.h":
                found.append(f"{where}; use narrow headers")
            if not target.startswith("banyan/"):
                continue
            other = target.split("/")[1]
            if other == "testing":
                if not is_test:
                    found.append(f"{where}; only tests may")
            elif other != folder and rank(other) >= rank(folder) and not is_test:
                found.append(f"{where}, which is not below {folder}/")
            elif other != folder and "/detail/" in target:
                found.append(f"{where}, which is private to {other}/")
    return found


def main() -> int:
    root = Path(__file__).resolve().parent.parent / "src" / "banyan"
    found = offences(root)
    print("\n".join(found) if found else "layers: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
