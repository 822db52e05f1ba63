"""Training: `banyan train` and, as in verl, `python3 -m banyan.trainer.main_ppo` with the same arguments.

Order: configuration, then every input file, then the model. A mistake of the user ends the run before the model is
loaded. The report is written at the end, and also when the run is interrupted or fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from banyan import algo_functions, extension
from banyan.config import schema
from banyan.config.resolve import Resolved, resolve
from banyan.errors import RunError, UserError, core_text
from banyan.feature import loading
from banyan.launch import session
from banyan.trainer import inputs as run_inputs
from banyan.trainer import run_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="verl's keys; also +key, ++key, ~key"
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--share", choices=("auto", "on", "off"), help="same as actor_rollout_ref.sharing.mode"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration and data, then stop"
    )


def add_config_arguments(parser: argparse.ArgumentParser, config_name: str = "ppo_trainer") -> None:
    """Where the configuration comes from, with Hydra's names."""
    parser.add_argument(
        "--config-name", "-cn", default=config_name, help="YAML file (default: %(default)s)"
    )
    parser.add_argument(
        "--config-path", "--config-dir", "-cp", "-cd", type=Path, help="folder of your YAML files"
    )


def resolve_arguments(args: argparse.Namespace, partial: bool = False) -> Resolved:
    """The configuration that the arguments name. Raises UserError."""
    check_config_path(args)
    overrides = list(args.overrides)
    if getattr(args, "share", None):
        overrides.append(f"actor_rollout_ref.sharing.mode={args.share}")
    name = args.config_name.removesuffix(".yaml")
    return resolve(overrides, name, args.config_path, partial=partial, trainer=trainer_of(name))


def check_config_path(args: argparse.Namespace) -> None:
    """Raises UserError unless the folder of YAML files is there, if one is named."""
    if args.config_path is not None and not args.config_path.is_dir():
        raise UserError(f"--config-path: wanted a folder, got {args.config_path}")


def trainer_of(config_name: str) -> str:
    """Whose keys a configuration has: ppo, unless the name is that of another trainer's file."""
    return config_name.removesuffix("_trainer") if config_name in schema.TRAINERS else "ppo"


def run(args: argparse.Namespace) -> int:
    """Trains. Returns 0; raises UserError for a user's mistake."""
    config = resolve_arguments(args)
    algo_functions.load(config)
    inputs = run_inputs.load(config)
    if args.dry_run:
        _check_rewards(config, inputs)
        for line in [*config.notes, *inputs.notes, "dry run: configuration and data are in order"]:
            print(line)
        return 0
    return train(config, inputs)


def _check_rewards(config: Resolved, inputs: run_inputs.Inputs) -> None:
    """Loads the reward function in a worker, as the run would."""
    from banyan.reward.manager import RewardManager

    with RewardManager(config.tree) as rewards:
        rewards.check_data_sources(inputs.data_sources())


def train(config: Resolved, inputs: run_inputs.Inputs, core: Any = None) -> int:
    """Runs the loop of the core (`banyan._C`, or a stand-in for tests) and writes the report.

    Where a launcher started several processes, each runs this; the first one logs and reports.
    """
    core = core or extension.load()
    directory = Path(config["trainer.default_local_dir"])
    settings = run_inputs.core_config(config, inputs)
    device, deadline_s = config["trainer.device"], config["actor_rollout_ref.nccl_timeout"]
    tokens = (prompt.tokens for prompt in inputs.train.prompts)
    mesh = core.mesh_shape(settings)
    with session.join(core, settings, device, deadline_s, tokens, mesh) as ranks:
        if ranks.core is not None and config["actor_rollout_ref.rollout.server_urls"]:
            raise UserError(
                "actor_rollout_ref.rollout.server_urls: wanted none with several processes: each would send its weights"
            )
        with run_directory.hold(directory) if ranks.is_first else nullcontext():
            return _train(config, inputs, core, directory, _share_of(settings, ranks), ranks)


def _share_of(settings: str, ranks: session.Ranks) -> str:
    """Without accelerators the processes of a machine share its memory, and with it the rollout's part of it."""
    tree = json.loads(settings)
    if ranks.local_size > 1 and tree["trainer"]["device"] == "cpu":
        tree["actor_rollout_ref"]["rollout"]["gpu_memory_utilization"] /= ranks.local_size
    return json.dumps(tree)


def _train(
    config: Resolved,
    inputs: run_inputs.Inputs,
    core: Any,
    directory: Path,
    core_config: str,
    ranks: session.Ranks,
) -> int:
    from banyan.log.loggers import RankLog, RunLog
    from banyan.report.summary import summarise
    from banyan.reward.manager import RewardManager
    from banyan.trainer.host import Host
    from banyan.trainer.interrupt import Interrupt

    log: Any
    if ranks.is_first:
        log = RunLog(directory, config["trainer.logger"], core.total_steps(core_config))
    else:
        log = RankLog(directory, ranks.rank)
    reward_log = directory / ("reward.log" if ranks.is_first else f"reward_{ranks.rank}.log")
    outcome: dict[str, Any] = {}
    report = None
    urls = config["actor_rollout_ref.rollout.server_urls"]
    with (
        loading.in_force(config.features, core, urls, log.say),
        RewardManager(config.tree, reward_log) as rewards,
        Interrupt(log.say) as interrupt,
        _generator(config, log.say) as generator,
    ):
        rewards.check_data_sources(inputs.data_sources())
        for line in [*config.notes, *inputs.notes]:
            log.say(line)
        algo_functions.register(core, config, algo_functions.load(config))
        host = Host(config, inputs, rewards, log, lambda: interrupt.asked, ranks.is_first)
        try:
            outcome = _run_core(core, core_config, host, generator, ranks)
        finally:
            log.console.close()
            if ranks.is_first:
                report = _write_report(directory, config, log.say, outcome)
    if ranks.is_first:
        for line in summarise(directory, outcome, report):
            log.say(line)
    log.close()
    return 0


def _generator(config: Resolved, say: Callable[[str], None]) -> Any:
    """A context with the servers that generate; with None where the built-in engine does."""
    if not config["actor_rollout_ref.rollout.server_urls"]:
        return nullcontext()
    try:
        from banyan.drivers import connect
    except ImportError as error:
        raise UserError(
            "actor_rollout_ref.rollout.server_urls: wanted the package httpx for them, got none: "
            "install banyan-rl[servers]"
        ) from error
    return connect.generator(config, say)


def _run_core(
    core: Any, config_json: str, host: Any, generator: Any, ranks: session.Ranks
) -> dict[str, Any]:
    """The core's summary. What it refuses before the first step is the user's mistake, later it is a failure."""
    arguments = [config_json, host]
    if generator is not None or ranks.core is not None:
        arguments.append(generator)
    if ranks.core is not None:
        arguments.append(ranks.core)
    try:
        return core.train(*arguments)
    except (ValueError, IndexError, TypeError, OSError) as error:
        if host.has_started:
            raise RunError(core_text(error)) from error
        raise UserError(core_text(error)) from error


def _write_report(
    directory: Path, config: Resolved, say: Callable[[str], None], outcome: dict[str, Any]
) -> Path | None:
    """The report's path; a report that cannot be written is said and never hides the run's own end."""
    from banyan.report.report import write_report

    try:
        return write_report(directory, config.tree, outcome)
    except OSError as error:
        say(f"report.html could not be written: {error}")
        return None


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python3 -m banyan.trainer.main_ppo`."""
    from banyan.cli.main import main as cli

    return cli(["train", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
