"""Everything a run reads, checked before a model is loaded: model folder, data files, reward file, checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan.config.resolve import Resolved
from banyan.data import dataset
from banyan.data.chat import Chat
from banyan.errors import UserError
from banyan.reward.model_text import ModelText, same_tokenizer


@dataclass(frozen=True)
class Inputs:
    """Tokenised data and the tokenizer."""

    chat: Chat
    train: dataset.Dataset
    validation: dataset.Dataset | None
    notes: list[str]
    reward_text: ModelText | None = None  # of a reward model with another tokenizer

    def data_sources(self) -> set[str]:
        """What the reward manager must have a scorer for."""
        rows = self.train.prompts + (self.validation.prompts if self.validation else [])
        return {prompt.data_source for prompt in rows}


def load(config: Resolved) -> Inputs:
    """Reads data and tokenizer, checks that the other files are there. Raises UserError."""
    model = Path(config["actor_rollout_ref.model.path"])
    check_model(model, "actor_rollout_ref.model.path")
    for key in ("actor_rollout_ref.ref.model.path", "critic.model.path"):
        if config[key]:
            check_model(Path(config[key]), key)
    _check_file(config["reward.custom_reward_function.path"], "reward.custom_reward_function.path")
    _check_resume(config)
    chat = Chat(
        Path(config["actor_rollout_ref.model.tokenizer_path"] or model),
        config["actor_rollout_ref.model.custom_chat_template"],
        config["data.trust_remote_code"] or config["actor_rollout_ref.model.trust_remote_code"],
    )
    reward_text = _reward_text(config, chat)
    train = dataset.load(config["data.train_files"], chat, _options(config, "train"))
    validation = None
    if config["data.val_files"]:
        validation = _shuffled(
            dataset.load(config["data.val_files"], chat, _options(config, "val")), config
        )
    if len(train) < config["data.train_batch_size"]:
        raise UserError(
            f"data.train_batch_size: wanted at most {len(train)}, the usable training rows, "
            f"got {config['data.train_batch_size']}"
        )
    notes = [*_notes("training", train), *_notes("validation", validation)]
    if reward_text:
        notes.append(
            "the reward model has a tokenizer of its own: it reads the text under its chat template"
        )
    return Inputs(chat, train, validation, [*notes, *_length_notes(config, model)], reward_text)


def _reward_text(config: Resolved, chat: Chat) -> ModelText | None:
    """How a reward model reads the samples; None without one, or where it has the actor's tokenizer."""
    key = "reward.reward_model.model_path"
    if not config["reward.reward_model.enable"]:
        return None
    if not config[key]:
        raise UserError(f"{key}: wanted a directory with reward.reward_model.enable=true, got null")
    model = Path(config[key])
    check_model(model, key)
    if same_tokenizer(chat.directory, model):
        return None
    return ModelText(model, chat, config["data.trust_remote_code"])


def check_model(directory: Path, key: str) -> None:
    """Raises UserError unless `directory` looks like a Hugging Face model folder."""
    if not directory.is_dir():
        raise UserError(
            f"{key}: wanted a local model directory, got {directory}; download or convert the model first"
        )
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{directory / 'config.json'}: no such file; wanted a Hugging Face model directory ({key})"
        )
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory}: wanted *.safetensors files ({key}), found none")


def _length_notes(config: Resolved, model: Path) -> list[str]:
    """Says that responses may end early where prompt and response together outgrow the model's positions."""
    positions = json.loads((model / "config.json").read_text(encoding="utf-8")).get(
        "max_position_embeddings"
    )
    wanted = config["data.max_prompt_length"] + config["data.max_response_length"]
    if not isinstance(positions, int) or wanted <= positions:
        return []
    return [
        f"data.max_prompt_length + data.max_response_length = {wanted}, but the model has {positions} positions: "
        "responses end there"
    ]


def core_config(config: Resolved, inputs: Inputs) -> str:
    """The resolved tree as JSON for the core, with what only the shell knows under `_shell`."""
    tree: dict[str, Any] = json.loads(json.dumps(config.tree))
    if inputs.validation is None:
        tree["trainer"].update(val_before_train=False, test_freq=-1)
    tree["_shell"] = {
        "num_train_rows": len(inputs.train),
        "stop_ids": inputs.chat.stop_ids(),
        "model_dir": config["actor_rollout_ref.model.path"],
        "features": config.features.sources if config.features else {},
    }
    return json.dumps(tree)


def _options(config: Resolved, part: str) -> dataset.Options:
    return dataset.Options(
        prompt_key=config["data.prompt_key"],
        reward_fn_key=config["data.reward_fn_key"],
        max_prompt_length=config["data.max_prompt_length"],
        truncation=config["data.truncation"],
        filter_overlong_prompts=config["data.filter_overlong_prompts"],
        max_samples=config[f"data.{part}_max_samples"],
        template_kwargs=config["data.apply_chat_template_kwargs"],
        keep_messages=config["reward.reward_model.enable"],
    )


def _shuffled(data: dataset.Dataset, config: Resolved) -> dataset.Dataset:
    if not config["data.validation_shuffle"]:
        return data
    from banyan.data.loader import Loader

    order = Loader(len(data), True, config["data.seed"] or 0).next(len(data))
    return dataset.Dataset(
        [data.prompts[row] for row in order], data.num_filtered, data.num_truncated
    )


def _check_file(path: str | None, key: str) -> None:
    if path and not Path(path).is_file():
        raise UserError(f"{key}: wanted a file, got {path}")


def _check_resume(config: Resolved) -> None:
    path = config["trainer.resume_from_path"]
    if config["trainer.resume_mode"] == "resume_path" and not (Path(path) / "state").is_dir():
        raise UserError(
            f"trainer.resume_from_path: wanted a checkpoint folder global_step_N with state/, got {path}"
        )


def _notes(name: str, data: dataset.Dataset | None) -> list[str]:
    if data is None:
        return ["data.val_files is null: no validation"]
    notes = [f"{len(data)} {name} rows"]
    if data.num_filtered:
        notes[0] += f", {data.num_filtered} filtered: prompts over data.max_prompt_length"
    if data.num_truncated:
        notes[0] += f", {data.num_truncated} prompts truncated to data.max_prompt_length"
    return notes
