"""`banyan trie explain` as a user types it: rows in all forms, the figures of the toy batch, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from banyan.cli.main import main
from shell_files import write_jsonl

TOY = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    {"tokens": [1, 2, 3, 4, 9, 10]},
    {"input_ids": [1, 2, 3]},
    {"input_ids": [1, 2, 3, 4, 5, 6, 11], "id": "d"},
    [1, 2, 3, 4, 9, 10],
    [12, 13, 14],
    [12, 13, 15, 2, 1],
]


def explain(*args, capsys) -> tuple[int, str, str]:
    code = main(["trie", "explain", *map(str, args)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_toy_batch(tmp_path: Path, capsys) -> None:
    file = write_jsonl(tmp_path / "toy.jsonl", TOY)
    picture = tmp_path / "toy.svg"
    code, text, _ = explain(file, "--svg", picture, capsys=capsys)
    assert code == 0
    assert "7 rows, 38 tokens, 17 unique: 21 saved (55.3 %)" in text
    assert "group 2: row 0 provides 6 tokens to row 3" in text
    assert "kept 17 of 38 tokens, 5 of 7 rows reuse" in text
    tree = ElementTree.parse(picture)
    boxes = [e for e in tree.iter("{http://www.w3.org/2000/svg}rect") if e.get("rx")]
    assert len(boxes) == 9


def test_thresholds_and_the_older_rule(tmp_path: Path, capsys) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [[1, 2, 10], [1, 2, 20], [1, 2, 30]])
    _, text, _ = explain(file, "--min-group-size", 3, capsys=capsys)
    assert "kept 5 of 9 tokens, 2 of 3 rows reuse" in text
    _, text, _ = explain(file, "--min-group-size", 3, "--detector", "trie_online", capsys=capsys)
    assert "kept 7 of 9 tokens, 1 of 3 rows reuse" in text
    _, text, _ = explain(file, "--min-prefix-len", 3, capsys=capsys)
    assert "kept 9 of 9 tokens, 0 of 3 rows reuse" in text


def test_texts_of_a_tokenizer(tmp_path: Path, model_dir: Path, capsys) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": "two and two"}, {"text": "two and six"}])
    picture = tmp_path / "out.svg"
    code, text, _ = explain(file, "--model", model_dir, "--svg", picture, capsys=capsys)
    assert code == 0
    assert "8 tokens from 0, 2 rows: two and " in text
    assert "two and" in picture.read_text()


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"text": "no tokenizer"}], "wanted --model"),
        ([{"id": 1}], "wanted a list of token ids, tokens, input_ids or text"),
        ([["a"]], "wanted a list of token ids"),
        ([[]], "wanted at least one token"),
        ([], "wanted at least one row"),
        ([3], "wanted an object, got int"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path: Path, capsys, rows, text) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, error = explain(file, capsys=capsys)
    assert code == 2
    assert text in error
    assert error.count("\n") == 1


def test_bad_thresholds_are_said(tmp_path: Path, capsys) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [[1]])
    code, _, error = explain(file, "--min-group-size", 1, capsys=capsys)
    assert code == 2
    assert "min_group_size: wanted >= 2, got 1" in error
