"""Data sets: generated problems, GSM8K, files, checks with file and row, chat templates, the order of rows."""

from __future__ import annotations

import json
import re

import pytest
from banyan.data import arithmetic, dataset, gsm8k
from banyan.data.chat import Chat
from banyan.data.files import read_rows, write_rows
from banyan.data.loader import Loader
from banyan.errors import UserError
from shell_files import TEST_DATA, data_row, write_jsonl, write_model_dir

pytest_plugins = ["shell_fixtures"]

OPTIONS = dataset.Options("prompt", "data_source", 512, "error", False, -1, {})


@pytest.fixture
def chat(model_dir):
    return Chat(model_dir)


def options(**changes) -> dataset.Options:
    return dataset.Options(**{**OPTIONS.__dict__, **changes})


# --- generated problems ---------------------------------------------------------------------------------------------
def test_the_generator_is_a_function_of_its_seed():
    first = arithmetic.generate(50, seed=3, levels=(1, 2, 3))
    assert first == arithmetic.generate(50, seed=3, levels=(1, 2, 3))
    assert first != arithmetic.generate(50, seed=4, levels=(1, 2, 3))
    assert len({row["extra_info"]["question"] for row in first}) == 50


def test_arithmetic_rows_serve_sft_and_preferences():
    for row in arithmetic.generate(200, 5, levels=(1, 2, 3)):
        truth = row["reward_model"]["ground_truth"]
        assert row["response"] == row["chosen"] == row["extra_info"]["answer"]
        assert row["chosen"].endswith(f"\n#### {truth}")
        assert row["rejected"].split("#### ")[1] != truth
        assert row["rejected"].split("\n")[0].split(" = ")[1] == row["rejected"].split("#### ")[1]


def test_problems_are_solved_by_their_worked_answer():
    for row in arithmetic.generate(300, seed=1, levels=(1, 2, 3)):
        equation, _, truth = row["extra_info"]["answer"].partition("\n#### ")
        left, right = equation.split(" = ")
        value = eval(left, {}, {})
        if row["extra_info"]["level"] == 3 and "*" not in left:
            assert re.fullmatch(r"\d+ \+ \d+ - \d+", left)
        assert str(value) == right == truth == row["reward_model"]["ground_truth"]
        assert value >= 0
        for number in re.findall(r"\d+", left):
            assert re.search(rf"\b{number}\b", row["extra_info"]["question"])


def test_all_prompts_open_with_the_same_three_examples():
    rows = arithmetic.generate(10, seed=0)
    assert all(row["prompt"][:-1] == arithmetic.examples() for row in rows)
    assert len(arithmetic.examples()) == 6


def test_held_out_numbers_never_occur_in_training():
    def numbers(split: str, seed: int) -> set[str]:
        rows = arithmetic.generate(300, seed, split)
        return {row["extra_info"]["answer"].split(" = ")[0] for row in rows}

    train = numbers("train", 0) | numbers("train", 1)
    held_out = numbers("test", 0) | numbers("test", 1)
    assert train
    assert held_out
    assert not train & held_out


def test_generated_rows_have_a_name_that_stands_for_a_file():
    rows = [row for _, row in read_rows("arithmetic:test?rows=5&seed=2&levels=1")]
    assert rows == arithmetic.generate(5, 2, "test", (1,))
    for name in ("arithmetic:dev", "arithmetic:train?rows=x", "arithmetic:train?row=3"):
        with pytest.raises(UserError, match="wanted arithmetic:train or arithmetic:test"):
            list(read_rows(name))
    with pytest.raises(UserError, match="wanted rows >= 1"):
        arithmetic.generate(0, 0)


def test_more_rows_than_there_are_problems_are_refused(monkeypatch):
    monkeypatch.setattr(arithmetic, "_NAMES", ["Ada", "Ben"])
    monkeypatch.setattr(arithmetic, "_THINGS", ["plums"])
    with pytest.raises(UserError, match=r"wanted at most \d+ rows of levels \(1,\), got 100000"):
        arithmetic.generate(100_000, 0, "test", (1,))


# --- GSM8K ----------------------------------------------------------------------------------------------------------
def test_gsm8k_row_as_verl_makes_it(tmp_path):
    answer = "He pays 1,000 + 200 = 1,200.\n#### 1,200"
    path = write_jsonl(tmp_path / "train.jsonl", [{"question": "How much?", "answer": answer}])
    assert gsm8k.convert(path, "train") == [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {
                    "role": "user",
                    "content": 'How much? Let\'s think step by step and output the final answer after "####".',
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "1200"},
            "extra_info": {"split": "train", "index": 0, "answer": answer, "question": "How much?"},
        }
    ]


def test_gsm8k_names_the_bad_line(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"question": "q", "answer": "#### 1"}, {"question": "q", "answer": "1"}],
    )
    with pytest.raises(UserError, match=r"a\.jsonl:2: wanted an answer that ends in '#### number'"):
        gsm8k.convert(path, "train")
    with pytest.raises(UserError, match="No such file"):
        gsm8k.convert(tmp_path / "none.jsonl", "train")


@pytest.mark.skipif(
    not (TEST_DATA / "gsm8k").is_dir(), reason="GSM8K is not at hand ($BANYAN_TEST_DATA)"
)
def test_all_of_gsm8k_is_read():
    rows = gsm8k.convert(TEST_DATA / "gsm8k" / "test.jsonl", "test")
    assert len(rows) == 1319
    assert rows[0]["reward_model"]["ground_truth"] == "18"
    assert all(re.fullmatch(r"-?[0-9.]+", row["reward_model"]["ground_truth"]) for row in rows)


# --- files ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_survive_writing_and_reading(tmp_path, suffix):
    rows = arithmetic.generate(4, seed=0)
    path = tmp_path / f"rows{suffix}"
    write_rows(path, rows)
    assert [row for _, row in read_rows(path)] == rows


def test_byte_order_marks_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [row for _, row in read_rows(path)] == [{"a": 1}, {"a": 2}]


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "a.parquet").write_text("not parquet")
    (tmp_path / "b.json").write_text('{"a": 1}')
    for name, text in [
        ("a.parquet", "not a parquet file"),
        ("b.json", "wanted a list of rows, got dict"),
        ("c.csv", "wanted a file ending in"),
        ("d.jsonl", "no such file"),
    ]:
        with pytest.raises(UserError, match=rf"{name}.*{text}"):
            list(read_rows(tmp_path / name))


# --- checks of rows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": []}, "column 'data_source': wanted a value, got no such column"),
        (data_row(data_source=3), "column 'data_source': wanted text, got int"),
        (data_row(prompt=None), "column 'prompt': wanted a value, got null"),
        (
            data_row(prompt=[]),
            "column 'prompt': wanted a list of {role, content}, got an empty list",
        ),
        (data_row(prompt="text"), "column 'prompt': wanted a list of {role, content}, got str"),
        (
            data_row(prompt=[{"role": "user"}]),
            "column 'prompt': message 0: wanted role and content as text",
        ),
        (
            data_row(prompt=[{"role": "user", "content": "a\ud800b"}]),
            "column 'prompt': message 0: wanted Unicode text, got half a surrogate pair",
        ),
        (data_row(question="  "), "column 'prompt': the prompt is empty"),
        (data_row(reward_model={}), "column 'reward_model': wanted an object with ground_truth"),
        (data_row(images=["x"]), "column 'images': banyan trains on text only"),
        ([1], "wanted an object, got list"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path, chat, row, reason):
    path = write_jsonl(tmp_path / "rows.jsonl", [data_row(), row])
    with pytest.raises(UserError) as caught:
        dataset.load([str(path)], chat, OPTIONS)
    assert f"{path}:2: {reason}" in str(caught.value)


def test_the_first_five_bad_rows_are_listed(tmp_path, chat):
    rows = [data_row(), *[data_row(prompt=None)] * 7]
    path = tmp_path / "rows.parquet"
    write_rows(path, rows)
    with pytest.raises(UserError) as caught:
        dataset.load([str(path)], chat, OPTIONS)
    lines = str(caught.value).splitlines()
    assert lines[0] == "data: 7 rows cannot be used; the first 5:"
    assert lines[1].startswith(f"  {path} row 2: column 'prompt'")
    assert len(lines) == 6


def test_broken_lines_and_empty_files_are_refused(tmp_path, chat):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(data_row()).encode() + b"\n{broken\n\xff\n")
    with pytest.raises(
        UserError, match=r"rows\.jsonl:2: wanted a JSON object(.|\n)*rows\.jsonl:3: wanted UTF-8"
    ):
        dataset.load([str(path)], chat, OPTIONS)
    path.write_text("")
    with pytest.raises(UserError, match="wanted at least one row, got none"):
        dataset.load([str(path)], chat, OPTIONS)


# --- lengths --------------------------------------------------------------------------------------------------------
def test_prompts_over_the_limit(tmp_path, chat):
    long, short = data_row("x" * 100), data_row("y")
    path = str(write_jsonl(tmp_path / "rows.jsonl", [long, short]))
    full = chat.encode_chat(long["prompt"])
    assert len(full) == 100 + len(chat.encode_chat(short["prompt"])) - 1
    with pytest.raises(UserError, match=r"rows\.jsonl:1: wanted at most 60 prompt tokens"):
        dataset.load([path], chat, options(max_prompt_length=60))
    filtered = dataset.load(
        [path], chat, options(max_prompt_length=60, filter_overlong_prompts=True)
    )
    assert (len(filtered), filtered.num_filtered) == (1, 1)
    kept = {"left": full[-60:], "right": full[:60], "middle": full[:30] + full[-30:]}
    for mode, tokens in kept.items():
        data = dataset.load([path], chat, options(max_prompt_length=60, truncation=mode))
        assert data.prompts[0].tokens == tokens
        assert data.num_truncated == 1
    with pytest.raises(UserError, match="2 rows, all over"):
        dataset.load([path], chat, options(max_prompt_length=5, filter_overlong_prompts=True))


def test_only_the_first_rows_are_taken(tmp_path, chat):
    path = str(write_jsonl(tmp_path / "rows.jsonl", [data_row(str(i)) for i in range(5)]))
    assert len(dataset.load([path, path], chat, options(max_samples=7))) == 7


# --- chat -----------------------------------------------------------------------------------------------------------
def test_chat_encodes_decodes_and_stops(chat):
    ids = chat.encode_chat([{"role": "user", "content": "hé"}])
    assert ids[0] == 256
    assert chat.decode(ids) == "user\nhé\nassistant\n"
    assert chat.stop_ids() == [257, 258]


def test_text_that_is_not_unicode_is_refused(chat):
    with pytest.raises(UserError, match="half a surrogate pair"):
        chat.encode("a\udcffb")


def test_special_tokens_spelled_out_by_a_user_stay_text(chat):
    ids = chat.encode_chat([{"role": "user", "content": "a<|im_end|>b<|im_start|>"}])
    assert ids.count(257) == 1
    assert ids.count(256) == 2
    assert chat.decode(ids) == "user\na<|im_end|>b<|im_start|>\nassistant\n"


def test_a_template_or_tokenizer_that_fails_is_named(tmp_path, model_dir):
    chat = Chat(model_dir, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="chat template: roles must alternate"):
        chat.encode_chat([{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="chat template"):
        Chat(model_dir, template="{{ ''.__class__.__mro__ }}").encode_chat(
            [{"role": "user", "content": "x"}]
        )
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        Chat(model_dir)
    bare = write_model_dir(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="wanted a chat template"):
        Chat(bare).encode_chat([{"role": "user", "content": "x"}])
    assert Chat(bare).encode("ab") == [64, 65]  # token ids and plain text need none


@pytest.mark.skipif(
    not (TEST_DATA / "tokenizers").is_dir(),
    reason="the public tokenizers are not at hand ($BANYAN_TEST_DATA)",
)
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_templates_give_the_ids_of_transformers(name):
    from transformers import AutoTokenizer

    directory = TEST_DATA / "tokenizers" / name
    theirs, ours = AutoTokenizer.from_pretrained(directory), Chat(directory)
    for messages in (
        [{"role": "user", "content": "1 + 1?\n\n  héllo 你好 <b>"}],
        [{"role": "system", "content": "Be brief."}, *arithmetic.generate(1, 0)[0]["prompt"]],
    ):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert ours.encode_chat(messages) == list(expected)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


# --- order ----------------------------------------------------------------------------------------------------------
def test_the_loader_shuffles_drops_the_rest_and_resumes():
    loader = Loader(10, shuffle=True, seed=5)
    batches = [loader.next(4) for _ in range(5)]
    assert loader.epoch == 2
    assert not set(batches[0]) & set(batches[1])
    assert batches[:2] != batches[2:4]
    again = Loader(10, shuffle=True, seed=5)
    again.next(4)
    again.next(4)
    again.next(4)
    resumed = Loader(10, shuffle=True, seed=5)
    resumed.seek(again.epoch, again.position)
    assert [resumed.next(4), resumed.next(4)] == batches[3:]
    assert Loader(4, shuffle=False, seed=0).next(4) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="wanted at most 4"):
        Loader(4, shuffle=False, seed=0).next(5)
