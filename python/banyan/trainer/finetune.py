"""Training on given text: what `banyan sft`, `banyan dpo` and `banyan reward-model` share.

Order: configuration, then every input file, then the model. A mistake of the user ends the run before the model is
loaded. The report is written at the end, and also when the run is interrupted or fails.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan import extension
from banyan.config.resolve import Resolved, resolve
from banyan.data import examples, turns
from banyan.data.chat import Chat
from banyan.data.loader import Loader
from banyan.errors import RunError, UserError, core_text
from banyan.feature import loading
from banyan.launch import session
from banyan.log.loggers import RankLog, RunLog
from banyan.trainer import run_directory
from banyan.trainer.inputs import check_model
from banyan.trainer.main_ppo import add_config_arguments


@dataclass(frozen=True)
class Inputs:
    """Tokenised rows of a run."""

    train: examples.Examples
    validation: examples.Examples | None
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser, config_name: str) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="verl's keys; also +key, ++key, ~key"
    )
    add_config_arguments(parser, config_name)
    parser.add_argument("--share", choices=("auto", "on", "off"), help="same as sharing.mode")
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration and data, then stop"
    )


def run(args: argparse.Namespace, trainer: str, fixed: tuple[str, ...] = ()) -> int:
    """Trains; `fixed` are arguments that the command itself sets. Returns 0; raises UserError for a user's mistake."""
    if args.config_path is not None and not args.config_path.is_dir():
        raise UserError(f"--config-path: wanted a folder, got {args.config_path}")
    share = [f"sharing.mode={args.share}"] if args.share else []
    name = args.config_name.removesuffix(".yaml")
    config = resolve([*fixed, *args.overrides, *share], name, args.config_path, trainer=trainer)
    inputs = load(config, trainer)
    if args.dry_run:
        for line in [*config.notes, *inputs.notes, "dry run: configuration and data are in order"]:
            print(line)
        return 0
    core = extension.load()
    settings = core_config(config, inputs)
    directory = Path(config["trainer.default_local_dir"])
    tokens = (sample.tokens for example in inputs.train.examples for sample in example)
    device, mesh = config["trainer.device"], core.finetune_mesh(settings)
    with session.join(core, settings, device, tokens=tokens, mesh=mesh) as ranks:  # noqa: SIM117
        with run_directory.hold(directory) if ranks.is_first else nullcontext():
            return _train(config, inputs, core, settings, ranks)


def load(config: Resolved, trainer: str) -> Inputs:
    """Reads and tokenises the rows, checks that the other files are there. Raises UserError."""
    model = Path(config["model.path"])
    check_model(model, "model.path")
    if trainer == "dpo" and config["preference.reference_path"]:
        check_model(Path(config["preference.reference_path"]), "preference.reference_path")
    chat = Chat(
        Path(config["model.tokenizer_path"] or model),
        config["model.custom_chat_template"],
        config["model.trust_remote_code"],
    )
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    read = examples.read_sft if trainer == "sft" else examples.read_pair

    def rows(part: str) -> examples.Examples:
        options = _options(config, part, vocab_size or chat.vocab_size)
        return examples.load(config[f"data.{part}_files"], chat, options, read)

    train = rows("train")
    validation = rows("val") if config["data.val_files"] else None
    if len(train) < config["data.train_batch_size"]:
        raise UserError(
            f"data.train_batch_size: wanted at most {len(train)}, the training rows, "
            f"got {config['data.train_batch_size']}"
        )
    notes = [*_notes("training", train), *_notes("validation", validation)]
    return Inputs(train, validation, notes)


def core_config(config: Resolved, inputs: Inputs) -> str:
    """The resolved tree as JSON for the core, with what only the shell knows under `_shell`."""
    tree: dict[str, Any] = json.loads(json.dumps(config.tree))
    tree["_shell"] = {
        "num_train_rows": len(inputs.train),
        "num_val_rows": len(inputs.validation) if inputs.validation else 0,
        "features": config.features.sources if config.features else {},
    }
    return json.dumps(tree)


class Host:
    """Implements train/finetune_host.h over the examples and the loggers."""

    def __init__(
        self, config: Resolved, inputs: Inputs, log: RunLog, should_stop: Callable[[], bool]
    ) -> None:
        self._inputs = inputs
        self._log = log
        self._loader = Loader(len(inputs.train), config["data.shuffle"], config["trainer.seed"])
        self._steps_given = 0
        self.should_stop = should_stop
        self.log = log.log
        self.say = log.say
        self.has_started = (
            False  # the core asked for its first rows: models and checkpoint are loaded
        )

    def next_rows(self, count: int) -> list[int]:
        self._steps_given += 1
        return self._loader.next(count)

    def examples(self, rows: list[int], validation: bool) -> list[list[tuple[Any, Any]]]:
        self.has_started = True
        data = self._inputs.validation if validation else self._inputs.train
        assert data is not None
        return [[(s.tokens, s.scored) for s in data.examples[row]] for row in rows]

    def save_state(self) -> str:
        place = {"epoch": self._loader.epoch, "position": self._loader.position}
        return json.dumps({**place, "steps_given": self._steps_given})

    def load_state(self, state: str) -> None:
        place = json.loads(state)
        self._loader.seek(place["epoch"], place["position"])
        self._steps_given = place["steps_given"]
        self._log.start(self._steps_given)


def _train(config: Resolved, inputs: Inputs, core: Any, settings: str, ranks: session.Ranks) -> int:
    from banyan.report.report import write_report
    from banyan.report.summary import summarise
    from banyan.trainer.interrupt import Interrupt

    directory = Path(config["trainer.default_local_dir"])
    batches = len(inputs.train) // config["data.train_batch_size"]
    steps = config["trainer.total_training_steps"] or config["trainer.total_epochs"] * batches
    log: Any = RankLog(directory, ranks.rank)
    if ranks.is_first:
        log = RunLog(directory, config["trainer.logger"], steps)
    outcome: dict[str, Any] = {}
    report = None
    with Interrupt(log.say) as interrupt:
        for line in [*config.notes, *inputs.notes]:
            log.say(line)
        host = Host(config, inputs, log, lambda: interrupt.asked)
        try:
            with loading.in_force(config.features, core, [], log.say):
                outcome = core.finetune(settings, host, ranks.core)
        except (ValueError, IndexError, TypeError, OSError) as error:
            kind = RunError if host.has_started else UserError
            raise kind(core_text(error)) from error
        finally:
            log.console.close()
            try:
                if ranks.is_first:
                    report = write_report(directory, config.tree, outcome)
            except OSError as error:
                log.say(f"report.html could not be written: {error}")
    if ranks.is_first:
        for line in summarise(directory, outcome, report):
            log.say(line)
    log.close()
    return 0


def _options(config: Resolved, part: str, vocab_size: int) -> examples.Options:
    names = ("messages", "tools", "enable_thinking", "prompt", "response", "chosen", "rejected")
    keys = {name: config.tree["data"].get(f"{name}_key", "") for name in names}
    return examples.Options(
        keys=keys,
        enable_thinking=config["data.enable_thinking_default"],
        max_length=config["data.max_length"],
        truncation=config["data.truncation"],
        max_samples=config[f"data.{part}_max_samples"],
        vocab_size=vocab_size,
        turns=turns.Options(
            config["banyan.data.each_turn"],
            config["data.ignore_input_ids_mismatch"],
            config["data.apply_chat_template_kwargs"],
        ),
    )


def _notes(name: str, data: examples.Examples | None) -> list[str]:
    if data is None:
        return ["data.val_files is null: no validation"]
    samples = [sample for example in data.examples for sample in example]
    note = (
        f"{len(data)} {name} rows, {sum(len(sample.tokens) for sample in samples)} tokens, "
        f"{sum(sum(sample.scored) for sample in samples)} of them trained on"
    )
    if data.num_truncated:
        note += f"; {data.num_truncated} rows truncated to data.max_length"
    return [note]
