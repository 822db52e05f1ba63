"""`banyan chat` over the fake engine, and the completion scripts of the shells."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from banyan.cli import chat as cli
from banyan.cli.main import VERBS, main
from banyan.data.chat import Chat
from banyan.errors import UserError
from banyan.serve.text_stream import TokenText
from fake_engine import FakeEngine
from shell_files import write_model_dir

SETTINGS = {
    "system": "",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_tokens": 50,
    "seed": 3,
}


@pytest.fixture
def talk(tmp_path):
    chat = Chat(write_model_dir(tmp_path / "model"))
    tokens = TokenText(chat.tokenizer, 259)
    end = chat.encode("<|im_end|>")
    engine = FakeEngine(
        lambda request, index: [*chat.encode("Hello, wörld!"), *end], tokens.for_stops(), 259
    )
    engine.start()
    yield cli.Conversation(engine, chat, tokens, 256, SETTINGS)
    engine.stop(5)


def prompt(talk):
    ids = talk._engine.requests[-1]["prompt"]
    return talk._chat.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_conversation(talk):
    pieces = list(talk.ask("hi"))
    assert "".join(pieces) == "Hello, wörld!"
    assert len(pieces) > 5  # as they come
    talk.system = "Be brief."
    assert "".join(talk.ask("and?")) == "Hello, wörld!"
    assert prompt(talk) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nHello, wörld!<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "".join(talk.retry()) == "Hello, wörld!"
    assert len(talk.messages) == 4
    talk.reset()
    with pytest.raises(UserError, match="nothing has been asked"):
        list(talk.retry())


def test_a_stopped_answer_is_aborted_and_kept(talk):
    pieces = talk.ask("hi")
    talk._engine.pass_seconds = 0.05
    said = [next(pieces), next(pieces)]
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(said)}
    assert len(talk._engine.aborted) == 1
    stale = {"request": "an earlier one", "finished": True, "finish": "abort", "tokens": []}
    talk._engine._emit(stale)
    assert "".join(talk.ask("again")) == "Hello, wörld!"


def test_a_long_conversation_says_what_to_do(talk):
    with pytest.raises(UserError, match="/reset begins anew"):
        list(talk.ask("x" * 300))
    assert talk.messages == []


def test_lines_and_commands(talk, monkeypatch, capsys):
    lines = iter(
        [
            "hi",
            "",
            "/system Be kind.",
            "/what",
            "/retry",
            "yes",
            KeyboardInterrupt,
            "/reset",
            "/exit",
        ]
    )

    def read(_):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    cli.repl(talk)
    captured = capsys.readouterr()
    assert captured.out == "Hello, wörld!\n" * 2
    assert "unknown command /what" in captured.err
    assert "nothing has been asked yet" in captured.err
    assert talk.system == "Be kind."
    assert talk.messages == []
    monkeypatch.setattr("builtins.input", lambda _: (_ for _ in ()).throw(EOFError))
    cli.repl(talk)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The script of each shell, in a file."""
    from contextlib import redirect_stdout

    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish", "tcsh"):
        with (folder / shell).open("w") as file, redirect_stdout(file):
            assert main(["completion", shell]) == 0
    return folder


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_scripts_know_every_command(scripts, shell):
    text = (scripts / shell).read_text()
    assert all(verb in text for verb in VERBS)
    if shutil.which(shell) and shell != "tcsh":
        assert subprocess.run([shell, "-n", scripts / shell]).returncode == 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["ser"], ["serve"]),
        (["serve", "--admin-p"], ["--admin-port"]),
        (["serve", "--logprobs-mode", ""], ["raw_logprobs", "processed_logprobs"]),
        (["train", "actor_rollout_ref.rollout.temp"], ["actor_rollout_ref.rollout.temperature="]),
        (["sft", "data.train_f"], ["data.train_files="]),
        (["config", "ex"], ["explain"]),
        (["config", "explain", "trainer.total_e"], ["trainer.total_epochs="]),
        (["completion", "f"], ["fish"]),
    ],
)
def test_bash_completes(scripts, words, wanted):
    line = " ".join(f"'{word}'" for word in ["banyan", *words])
    script = (
        f"source {scripts / 'bash'}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
        "_banyan_complete; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert found.stdout.split() == wanted, found.stderr
