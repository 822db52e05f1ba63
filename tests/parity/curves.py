"""Training curves of banyan beside plain PyTorch: the step of the baseline, the comparison, the figures kept."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch

FIGURES = Path(__file__).parent / "figures"


def token_log_probs(model, samples: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities of tokens 1..n-1 under a transformers model, log-softmax in fp64; one padded batch."""
    size = max(len(sample) for sample in samples)
    ids = torch.zeros((len(samples), size), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
    logits = model(ids).logits[:, :-1]
    out = []
    for row, sample in enumerate(samples):
        chosen = ids[row, 1 : len(sample), None]
        table = logits[row, : len(sample) - 1].double().log_softmax(-1)
        out.append(table.gather(-1, chosen)[:, 0])
    return out


def adamw(model, optim: dict) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=optim["lr"],
        betas=tuple(optim["betas"]),
        weight_decay=optim["weight_decay"],
    )


def descend(model, optimizer, loss: torch.Tensor, clip: float) -> float:
    """One step of the baseline; returns the gradient norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return norm.item()


def compare(ours: list[tuple[float, float]], theirs: list[tuple[float, float]], **about) -> dict:
    """Errors of (loss, gradient norm) curves, with the curves themselves."""
    loss = [abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)]
    norm = [abs(a - b) / b for (_, a), (_, b) in zip(ours, theirs, strict=True)]
    return {
        **about,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": len(loss),
        "loss_mean_absolute_error": sum(loss) / len(loss),
        "loss_max_absolute_error": max(loss),
        "grad_norm_mean_relative_error": sum(norm) / len(norm),
        "grad_norm_max_relative_error": max(norm),
        "banyan": [[round(a, 7), round(b, 6)] for a, b in ours],
        "torch_over_transformers": [[round(a, 7), round(b, 6)] for a, b in theirs],
    }


def check(name: str, figures: dict) -> None:
    """Holds the errors to the bounds; keeps the figures if BANYAN_KEEP_FIGURES is set."""
    if os.environ.get("BANYAN_KEEP_FIGURES"):
        keep(name, figures)
    assert figures["loss_mean_absolute_error"] <= 1e-4
    assert figures["grad_norm_mean_relative_error"] <= 1e-3


def keep(name: str, figures: dict) -> None:
    """Writes tests/parity/figures/<name>.json."""
    FIGURES.mkdir(exist_ok=True)
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items())
    (FIGURES / f"{name}.json").write_text("{\n" + rows + "\n}\n")
