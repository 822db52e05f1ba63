"""The work of a preset: the prompts, and what is generated from each.

`gsm8k-8x8x128`: 8 prompts of GSM8K, 8 responses each of exactly 128 tokens; `1x1`, `8x8` and `16x8`
are prompts by responses of the same kind. The questions come from $BANYAN_TEST_DATA, else
../shared/data; without either, prompts of about the same length are made up, and the result says so.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from banyan.data import gsm8k
from banyan.data.chat import Chat
from banyan.errors import UserError


@dataclass(frozen=True)
class Preset:
    num_prompts: int
    group_size: int  # responses of one prompt
    response_length: int  # tokens, exactly
    micro_batch: int  # samples that end in one block


ROLLOUT_PRESETS = ("1x1", "8x8", "16x8")  # what `banyan bench rollout` measures

PRESETS = {
    "gsm8k-8x8x128": Preset(8, 8, 128, 8),
    "1x1": Preset(1, 1, 128, 8),
    "8x8": Preset(8, 8, 128, 8),
    "16x8": Preset(16, 8, 128, 8),
    "tiny-1x2x8": Preset(1, 2, 8, 2),
    "tiny-2x2x8": Preset(2, 2, 8, 2),  # seconds even for a debug build; not a measurement
}


def find_gsm8k() -> Path | None:
    """The training questions of GSM8K on this machine, or None."""
    data = os.environ.get("BANYAN_TEST_DATA")
    folders = [Path(data)] if data else [Path.cwd().parent / "shared" / "data"]
    for folder in folders:
        path = folder / "gsm8k" / "train.jsonl"
        if path.is_file():
            return path
    return None


def prompts_of(preset: Preset, chat: Chat) -> tuple[list[list[int]], str]:
    """Token ids of the prompts, and where they come from: "gsm8k" or "generated"."""
    path = find_gsm8k()
    if path is not None:
        rows = gsm8k.convert(path, "train")[: preset.num_prompts]
        return [chat.encode_chat(row["prompt"]) for row in rows], "gsm8k"
    return [chat.encode_chat(_question(i)) for i in range(preset.num_prompts)], "generated"


def _question(index: int) -> list[dict[str, str]]:
    """A made-up question of 40 to 70 words, fixed by its index."""
    rng = random.Random(index)
    names = ["Ada", "Noor", "Jun", "Mila", "Tom"]
    goods = ["apples", "pens", "books", "stones", "tickets"]
    parts = [
        f"{rng.choice(names)} buys {rng.randrange(2, 99)} {rng.choice(goods)} on day {day + 1} "
        "and gives some of them away."
        for day in range(rng.randrange(3, 6))
    ]
    text = " ".join(parts) + " How many are left in all?"
    return [{"role": "user", "content": text}]


def find_preset(name: str) -> Preset:
    """Raises UserError for an unknown name."""
    if name not in PRESETS:
        raise UserError(f"--preset: wanted one of {', '.join(PRESETS)}, got {name}")
    return PRESETS[name]
