"""Rows of `banyan sft` and `banyan dpo` to samples: data forms, masks of the assistant, errors with file and row."""

from __future__ import annotations

import pytest
from banyan.data import dataset, examples, turns
from banyan.data.chat import Chat
from banyan.data.files import write_rows
from banyan.errors import UserError
from shell_files import TEST_DATA, data_row, write_jsonl

END, EOT = 257, 258  # <|im_end|>, <|endoftext|> of the tests' tokenizer
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4\n"},
]
pytest_plugins = ["shell_fixtures"]

KEYS = {
    name: name
    for name in ("messages", "tools", "enable_thinking", "prompt", "response", "chosen", "rejected")
}


def options(each_turn=False, ignore_mismatch=False, template_kwargs=None, **changes):
    how = turns.Options(each_turn, ignore_mismatch, template_kwargs or {})
    values = {
        "keys": KEYS,
        "enable_thinking": None,
        "max_length": 4096,
        "truncation": "error",
        "max_samples": -1,
        "vocab_size": 300,
        "turns": how,
    }
    return examples.Options(**{**values, **changes})


@pytest.fixture
def chat(model_dir) -> Chat:
    return Chat(model_dir)


def scored_texts(chat: Chat, sample) -> list[str]:
    """The runs of scored tokens as text, special tokens shown."""
    runs: list[list[int]] = []
    last = 0
    for token, scored in zip(sample.tokens, sample.scored, strict=True):
        if scored and not last:
            runs.append([])
        if scored:
            runs[-1].append(token)
        last = scored
    return [chat._tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def load(tmp_path, chat, row, read=examples.read_sft, **changes):
    path = write_jsonl(tmp_path / "rows.jsonl", row if isinstance(row, list) else [row])
    return examples.load([str(path)], chat, options(**changes), read)


def reason(tmp_path, chat, row, read=examples.read_sft, **changes) -> str:
    with pytest.raises(UserError) as error:
        load(tmp_path, chat, row, read, **changes)
    return str(error.value)


# --- chats ----------------------------------------------------------------------------------------------------------
def test_every_assistant_turn_is_scored_up_to_the_token_that_ends_it(tmp_path, chat):
    [[sample]] = load(tmp_path, chat, {"messages": CHAT}).examples
    assert scored_texts(chat, sample) == ["2<|im_end|>", "4\n<|im_end|>"]
    whole = chat.render(CHAT, {"add_generation_prompt": False})
    assert list(sample.tokens) == chat.encode(whole)


def test_the_scored_tokens_follow_what_a_rollout_is_given(tmp_path, chat):
    [[sample]] = load(tmp_path, chat, {"messages": CHAT}).examples
    opening = chat.encode_chat(CHAT[:4])
    assert list(sample.tokens[: len(opening)]) == opening
    assert sample.scored[len(opening) - 1 : len(opening) + 1] == bytes([0, 1])


def test_each_turn_becomes_a_sample_with_its_own_history(tmp_path, chat):
    [samples] = load(tmp_path, chat, {"messages": CHAT}, each_turn=True).examples
    assert [scored_texts(chat, sample) for sample in samples] == [
        ["2<|im_end|>"],
        ["4\n<|im_end|>"],
    ]
    first, second = samples
    assert second.tokens[: len(first.tokens)] == first.tokens
    [[together]] = load(tmp_path, chat, {"messages": CHAT}).examples
    assert sum(together.scored) == sum(first.scored) + sum(second.scored)


def test_a_template_that_rewrites_history_needs_a_sample_per_turn(tmp_path, model_dir):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('/')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Chat(model_dir, template)
    thoughts = [
        {**m, "content": "hm/" + m["content"]} if m["role"] == "assistant" else m for m in CHAT
    ]
    text = reason(tmp_path, chat, {"messages": thoughts})
    assert (
        "rows.jsonl:1: column 'messages': message 2: the chat template renders this turn diff"
        in text
    )
    assert "banyan.data.each_turn=true" in text
    [samples] = load(tmp_path, chat, {"messages": thoughts}, each_turn=True).examples
    assert [scored_texts(chat, sample) for sample in samples] == [
        ["hm/2<|im_end|>"],
        ["hm/4\n<|im_end|>"],
    ]
    assert "hm" not in chat.decode(list(samples[1].tokens)).split("2 + 2")[0]


def test_a_turn_whose_edge_falls_inside_a_token_is_refused_or_cut(tmp_path, model_dir):
    import tokenizers

    path = str(model_dir / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_tokens([":yes"])
    tokenizer.save(path)
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = Chat(model_dir, template)
    row = {
        "messages": [{"role": "user", "content": "ok?"}, {"role": "assistant", "content": "yes"}]
    }
    assert "data.ignore_input_ids_mismatch=true" in reason(tmp_path, chat, row)
    [[sample]] = load(tmp_path, chat, row, ignore_mismatch=True).examples
    assert scored_texts(chat, sample) == ["yes<|im_end|>"]
    assert chat.decode(list(sample.tokens)) == "user:ok?assistant:yes"


def test_special_tokens_spelled_out_in_a_turn_stay_text_and_scored(tmp_path, chat):
    row = {"messages": [CHAT[1], {"role": "assistant", "content": "a<|im_end|>b"}]}
    [[sample]] = load(tmp_path, chat, row).examples
    assert scored_texts(chat, sample) == ["a<|im_end|>b<|im_end|>"]
    inside = [token for token, scored in zip(sample.tokens, sample.scored, strict=True) if scored]
    assert inside.count(END) == 1


def test_letters_of_several_bytes_are_scored_whole(tmp_path, chat):
    row = {"messages": [CHAT[1], {"role": "assistant", "content": "zwölf 你好"}]}
    [[sample]] = load(tmp_path, chat, row).examples
    assert scored_texts(chat, sample) == ["zwölf 你好<|im_end|>"]


def test_tools_and_thinking_reach_the_template(tmp_path, model_dir):
    template = (
        "{% if tools %}[{{ tools[0].name }}]{% endif %}{% if enable_thinking is defined %}"
        "<{{ enable_thinking }}>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}({{ m.tool_calls[0].name }}){% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat = Chat(model_dir, template)
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "sum"}]}
    row = {"messages": [CHAT[1], called], "tools": [{"name": "sum"}], "enable_thinking": False}
    [[sample]] = load(tmp_path, chat, row).examples
    assert scored_texts(chat, sample) == ["(sum)<|im_end|>"]
    assert chat.decode(list(sample.tokens)).startswith("[sum]<False>user:")
    del row["enable_thinking"]
    [[sample]] = load(tmp_path, chat, row, enable_thinking=True).examples
    assert chat.decode(list(sample.tokens)).startswith("[sum]<True>user:")


@pytest.mark.skipif(
    not (TEST_DATA / "tokenizers").is_dir(),
    reason="the public tokenizers are not at hand ($BANYAN_TEST_DATA)",
)
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_masks_under_public_templates_are_the_answers(tmp_path, name):
    chat = Chat(TEST_DATA / "tokenizers" / name)
    messages = [
        CHAT[0],
        {"role": "user", "content": "1+1?\n\n héllo 你好"},
        {**CHAT[2], "content": "二 ok"},
    ]
    [[sample]] = load(tmp_path, chat, {"messages": messages}, vocab_size=200000).examples
    [text] = scored_texts(chat, sample)
    assert text.endswith("二 ok<|im_end|>")
    assert "assistant" not in text
    if name == "qwen3":  # drops earlier thoughts: each turn has a history of its own
        assert "each_turn" in reason(tmp_path, chat, {"messages": CHAT}, vocab_size=200000)
    each = load(tmp_path, chat, {"messages": CHAT}, each_turn=True, vocab_size=200000).examples[0]
    texts = [scored_texts(chat, sample)[0].split("\n\n")[-1] for sample in each]
    assert [text.replace("\n", "") for text in texts] == ["2<|im_end|>", "4<|im_end|>"]
    gap = [*messages[:2], {**CHAT[2], "content": "\n\nok"}]  # its line feeds join the template's
    if name == "qwen2.5":
        assert "ignore_input_ids_mismatch" in reason(
            tmp_path, chat, {"messages": gap}, vocab_size=200000
        )


# --- prompts with responses, token ids ---------------------------------------------------------------------------
def test_text_is_one_message(tmp_path, chat):
    rows = [
        {"prompt": "1 + 1?", "response": "2"},
        {"prompt": [CHAT[1]], "response": [CHAT[2]]},
        {"messages": [CHAT[1], CHAT[2]]},
    ]
    first, second, third = load(tmp_path, chat, rows).examples
    assert first == second == third


def test_turns_of_the_prompt_are_not_scored(tmp_path, chat):
    [[sample]] = load(tmp_path, chat, {"prompt": CHAT[:4], "response": "4\n"}).examples
    assert scored_texts(chat, sample) == ["4\n<|im_end|>"]


def test_a_dotted_name_reaches_into_an_object(tmp_path, chat):
    row = {"extra_info": {"question": "1 + 1?", "answer": "2"}}
    keys = {**KEYS, "prompt": "extra_info.question", "response": "extra_info.answer"}
    [[sample]] = load(tmp_path, chat, row, keys=keys).examples
    assert scored_texts(chat, sample) == ["2<|im_end|>"]


def test_token_ids_are_taken_with_their_mask(tmp_path, chat):
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}, {"input_ids": [5, 6]}]
    path = tmp_path / "rows.parquet"
    write_rows(path, rows)
    [[first], [second]] = examples.load([str(path)], chat, options(), examples.read_sft).examples
    assert (list(first.tokens), first.scored) == ([5, 6, 7], bytes([0, 1, 0]))
    assert (list(second.tokens), second.scored) == ([5, 6], bytes([1, 1]))


def test_long_samples_are_refused_or_cut_with_their_mask(tmp_path, chat):
    row = {"input_ids": list(range(1, 9)), "loss_mask": [0, 0, 1, 0, 0, 1, 1, 0]}
    assert "rows.jsonl:1: wanted at most 4 tokens (data.max_length), got 8" in reason(
        tmp_path, chat, row, max_length=4
    )
    kept = {"left": ([5, 6, 7, 8], [0, 1, 1, 0]), "right": ([1, 2, 3, 4], [0, 0, 1, 0])}
    kept["middle"] = ([1, 2, 7, 8], [0, 0, 1, 0])
    for mode, (tokens, scored) in kept.items():
        data = load(tmp_path, chat, row, max_length=4, truncation=mode)
        [[sample]] = data.examples
        assert (list(sample.tokens), list(sample.scored)) == (tokens, scored)
        assert data.num_truncated == 1
    late = {"input_ids": list(range(1, 9)), "loss_mask": [0] * 7 + [1]}
    assert "got none within data.max_length" in reason(
        tmp_path, chat, late, max_length=4, truncation="right"
    )


# --- pairs ----------------------------------------------------------------------------------------------------------
def test_the_forms_of_a_pair_give_the_same_samples(tmp_path, chat):
    asked, right, wrong = CHAT[1], CHAT[2], {"role": "assistant", "content": "3"}
    rows = [
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [asked], "chosen": [right], "rejected": [wrong]},
        {"chosen": [asked, right], "rejected": [asked, wrong]},
    ]
    first, second, third = load(tmp_path, chat, rows, examples.read_pair).examples
    assert first == second == third
    assert [scored_texts(chat, sample) for sample in first] == [["2<|im_end|>"], ["3<|im_end|>"]]


def test_a_pair_of_token_ids(tmp_path, chat):
    row = {"prompt_input_ids": [1, 2], "chosen_input_ids": [3], "rejected_input_ids": [4, 5]}
    [[chosen, rejected]] = load(tmp_path, chat, row, examples.read_pair).examples
    assert (list(chosen.tokens), list(chosen.scored)) == ([1, 2, 3], [0, 0, 1])
    assert (list(rejected.tokens), list(rejected.scored)) == ([1, 2, 4, 5], [0, 0, 1, 1])


# --- rows that cannot be used ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"text": "x"},
            "wanted column 'messages', or 'prompt' and 'response', or 'input_ids'; got text",
        ),
        (
            {"messages": []},
            "column 'messages': wanted a list of {role, content}, got an empty list",
        ),
        ({"messages": [{"role": "user"}]}, "message 0: wanted role and content as text"),
        ({"messages": [CHAT[1]]}, "wanted an assistant message to train on, got none"),
        ({"prompt": "x"}, "'prompt' and 'response'"),
        (
            {"prompt": 3, "response": "x"},
            "column 'prompt': wanted a list of {role, content}, got int",
        ),
        (
            {"input_ids": [1, 300]},
            "column 'input_ids': entry 1: wanted a token id in [0, 300), got 300",
        ),
        ({"input_ids": "abc"}, "column 'input_ids': wanted a list of token ids, got str"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "column 'loss_mask': wanted 2 entries of 0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "column 'loss_mask': wanted 2 entries"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0]}, "wanted a token to train on behind the first"),
        ({"messages": [CHAT[1], {**CHAT[2], "content": "\ud800"}]}, "half a surrogate pair"),
    ],
)
def test_bad_rows_of_sft(tmp_path, chat, row, text):
    said = reason(tmp_path, chat, row)
    assert "rows.jsonl:1: " in said
    assert text in said


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"prompt": "x", "chosen": "y"},
            "wanted columns 'chosen' and 'rejected'; got prompt, chosen",
        ),
        ({"chosen": "x", "rejected": "y"}, "column 'prompt': wanted a prompt"),
        ({"chosen": [CHAT[1], CHAT[2]], "rejected": [CHAT[3], CHAT[4]]}, "that begin alike"),
        ({"prompt": "x", "chosen": 3, "rejected": "y"}, "column 'chosen': wanted a list"),
        (
            {"chosen_input_ids": [1], "rejected_input_ids": None},
            "column 'rejected_input_ids': wanted",
        ),
    ],
)
def test_bad_rows_of_dpo(tmp_path, chat, row, text):
    said = reason(tmp_path, chat, row, examples.read_pair)
    assert "rows.jsonl:1: " in said
    assert text in said


def test_no_rows_are_an_error(tmp_path, chat):
    assert "wanted at least one row, got none" in reason(tmp_path, chat, [])


# --- prompts of reinforcement learning ---------------------------------------------------------------------------
def rl_options(**changes):
    values = {
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "max_prompt_length": 100,
        "truncation": "error",
        "filter_overlong_prompts": False,
        "max_samples": -1,
        "template_kwargs": {},
    }
    return dataset.Options(**{**values, **changes})


def test_rl_prompts_may_be_chats_of_several_turns_or_token_ids(tmp_path, chat):
    ids = chat.encode_chat(CHAT[:4])
    rows = [data_row(prompt=CHAT[:4]), data_row(prompt=ids), {**data_row(), "input_ids": ids}]
    del rows[2]["prompt"]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    data = dataset.load([path], chat, rl_options())
    assert [prompt.tokens for prompt in data.prompts] == [ids, ids, ids]
    assert data.prompts[0].text == "And 2 + 2?"
    assert data.prompts[1].text.endswith("And 2 + 2?\nassistant\n")


def test_rl_token_ids_are_checked(tmp_path, chat):
    path = str(write_jsonl(tmp_path / "rows.jsonl", [data_row(prompt=[1, 999])]))
    with pytest.raises(
        UserError, match=r"rows\.jsonl:1: column 'prompt': entry 1: wanted a token id"
    ):
        dataset.load([path], chat, rl_options())
