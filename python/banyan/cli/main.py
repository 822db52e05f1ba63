"""`banyan VERB ...`: finds the verb's module, parses, runs. Exit codes: 0 done, 2 wrong input, 1 anything else.

A verb's module has `add_arguments(parser)` and `run(args) -> int`. A user's mistake prints one line; a traceback is
printed only for a fault of banyan itself.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from contextlib import ExitStack

from banyan import version
from banyan.errors import RunError, UserError

VERBS = {
    "train": ("banyan.trainer.main_ppo", "train a model by reinforcement learning"),
    "sft": ("banyan.trainer.sft_trainer", "train a model on chats, answers or token ids"),
    "dpo": ("banyan.trainer.dpo_trainer", "train a model on preferences: DPO or IPO"),
    "reward-model": (
        "banyan.trainer.reward_model_trainer",
        "train a reward model on preferences (Bradley-Terry)",
    ),
    "launch": ("banyan.cli.launch", "place the processes of a run on a Ray cluster"),
    "generate": ("banyan.cli.generate", "generate responses to prompts"),
    "eval": ("banyan.cli.evaluate", "accuracy of a model on a data file, sampled and greedy"),
    "score": ("banyan.cli.score", "log-probability and entropy of every token of given texts"),
    "convert": (
        "banyan.convert.cli",
        "turn a GGUF file or a package with one into a model directory",
    ),
    "chat": ("banyan.cli.chat", "talk to a model in the terminal"),
    "data": ("banyan.cli.data", "make or convert data files"),
    "config": ("banyan.cli.config", "show the resolved configuration, or explain a key"),
    "features": ("banyan.cli.features", "list the features, their switches and what each is here"),
    "trie": ("banyan.cli.trie", "explain what sharing makes of a batch of token ids"),
    "serve": ("banyan.cli.serve", "serve a model over HTTP: OpenAI, vLLM and SGLang routes"),
    "bench": ("banyan.bench.cli", "time a step or a rollout"),
    "doctor": ("banyan.cli.doctor", "versions, processor, memory, devices, and what is missing"),
    "completion": ("banyan.cli.completion", "print the completion script of a shell"),
}
_DONE, _FAILED, _WRONG_INPUT = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Runs one command; never raises for a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return _DONE if argv else _WRONG_INPUT
    if argv[0] in ("-V", "--version"):
        print(f"banyan {version()}")
        return _DONE
    if argv[0] not in VERBS:
        print(
            f"banyan: unknown command {argv[0]!r}; wanted one of {', '.join(VERBS)}",
            file=sys.stderr,
        )
        return _WRONG_INPUT
    return _run(argv[0], argv[1:])


def _run(verb: str, argv: list[str]) -> int:
    module_name, summary = VERBS[verb]
    try:
        module = importlib.import_module(module_name)
        parser = argparse.ArgumentParser(
            prog=f"banyan {verb}", description=f"{summary[0].upper()}{summary[1:]}."
        )
        module.add_arguments(parser)
        # Options may stand between the key=value arguments, as with Hydra.
        positional = any(
            not action.option_strings and action.nargs == "*" for action in parser._actions
        )
        args = parser.parse_intermixed_args(argv) if positional else parser.parse_args(argv)
        with ExitStack() as args.at_exit:  # what a command needs until it ends
            return module.run(args)
    except UserError as error:
        print(f"banyan {verb}: {error}", file=sys.stderr)
        return _WRONG_INPUT
    except KeyboardInterrupt:
        print(f"banyan {verb}: interrupted", file=sys.stderr)
        return _FAILED
    except BrokenPipeError:
        return _FAILED
    except SystemExit as error:  # argparse: 0 after --help, 2 after a wrong option
        return error.code if isinstance(error.code, int) else _FAILED
    except (RunError, OSError) as error:
        print(f"banyan {verb}: {error}", file=sys.stderr)
        return _FAILED
    except Exception:
        traceback.print_exc()
        return _FAILED


def _help() -> str:
    width = max(len(verb) for verb in VERBS)
    verbs = "\n".join(f"  {verb:<{width}}  {summary}" for verb, (_, summary) in VERBS.items())
    return (
        "usage: banyan COMMAND [arguments]\n\n"
        "Reinforcement learning of language models with every shared token computed once.\n\n"
        f"commands:\n{verbs}\n\n"
        "`banyan COMMAND --help` says more; `banyan --version` prints the version."
    )


if __name__ == "__main__":
    sys.exit(main())
