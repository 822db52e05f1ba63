"""report.html: what a run did, in one self-contained file made from metrics.jsonl and samples.jsonl.

No script, no network, no account: charts are inline SVG, styles are in the page. It is written at the end of a run and
also when a run is interrupted, from whatever lines are there.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from banyan.log.jsonl import by_step, read
from banyan.report import style
from banyan.report.charts import Points, Series, line_chart, short
from banyan.report.summary import headline

Steps = dict[int, dict[str, Any]]

# Title, unit, then (name, metric) of each line; a metric that a run lacks is left out.
_CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", "", (("training", "train/loss"), ("validation", "val/loss"))),
    (
        "Pairs in order",
        "share",
        (("training", "rewards/accuracies"), ("validation", "val/rewards/accuracies")),
    ),
    ("Reward margin", "", (("training", "rewards/margins"), ("validation", "val/rewards/margins"))),
    ("Reward", "", (("mean", "critic/score/mean"),)),
    (
        "Response length",
        "tokens",
        (("mean", "response_length/mean"), ("max", "response_length/max")),
    ),
    ("Entropy", "nats", (("entropy", "actor/entropy"),)),
    ("KL", "nats", (("to the reference", "actor/kl_loss"), ("of the update", "actor/ppo_kl"))),
    (
        "Gradient norm",
        "",
        (("before clipping", "actor/grad_norm"), ("before clipping", "train/grad_norm")),
    ),
    ("Learning rate", "", (("learning rate", "actor/lr"), ("learning rate", "train/lr"))),
    (
        "Tokens of a step",
        "tokens",
        (("logical", "trie/logical_tokens"), ("unique", "trie/unique_tokens")),
    ),
    ("Throughput", "tokens/s", (("tokens per second", "perf/throughput"),)),
    (
        "Stage times",
        "s",
        (
            ("rollout", "timing_s/gen"),
            ("waiting for rewards", "timing_s/reward"),
            ("old log-probs", "timing_s/old_log_prob"),
            ("reference", "timing_s/ref"),
            ("update", "timing_s/update_actor"),
        ),
    ),
    ("Groups with equal rewards", "share", (("no signal", "training/flat_group_ratio"),)),
    (
        "Rollout against trainer",
        "largest gap of probabilities",
        (("largest difference of probabilities", "training/rollout_probs_diff_max"),),
    ),
)


def write_report(directory: Path, tree: dict[str, Any], outcome: dict[str, Any]) -> Path | None:
    """Writes `<directory>/report.html` and returns its path; None if no step was logged."""
    steps = by_step(read(directory / "metrics.jsonl"))
    if not steps:
        return None
    samples = read(directory / "samples.jsonl")
    path = directory / "report.html"
    draft = path.with_suffix(".html.tmp")
    draft.write_text(render(steps, samples, tree, outcome), encoding="utf-8")
    os.replace(draft, path)
    return path


def render(
    steps: Steps, samples: list[dict[str, Any]], tree: dict[str, Any], outcome: dict[str, Any]
) -> str:
    """The page."""
    trainer = tree["trainer"]
    title = f"{trainer['project_name']} / {trainer['experiment_name']}"
    if not outcome:
        state = "The run ended before its last step."
    elif outcome.get("stopped_early"):
        state = f"Stopped after step {outcome['last_step']}."
    else:
        state = f"Finished after step {outcome['last_step']}."
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
        for name, value in headline(steps)
    )
    charts = "".join([_validation_chart(steps), *(_chart(steps, *chart) for chart in _CHARTS)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style.SHEET}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{escape(state)}</p></header>"
        f'<section class="cards">{cards}</section>'
        f'<h2>Per step</h2><section class="charts">{charts}</section>'
        f"{_samples(samples)}{_settings(tree)}</body></html>\n"
    )


def _chart(steps: Steps, title: str, unit: str, lines: tuple[tuple[str, str], ...]) -> str:
    return line_chart(title, unit, [Series(name, _points(steps, metric)) for name, metric in lines])


def _validation_chart(steps: Steps) -> str:
    names = sorted(
        {name for values in steps.values() for name in values if name.startswith("val-core/")}
    )
    names = [name for name in names if name.rsplit("/", 1)[-1].startswith("mean@")]
    return line_chart(
        "Validation",
        "",
        [Series(name.removeprefix("val-core/"), _points(steps, name)) for name in names],
    )


def _points(steps: Steps, metric: str) -> Points:
    found = [(float(step), values.get(metric)) for step, values in sorted(steps.items())]
    return [(step, float(value)) for step, value in found if isinstance(value, (int, float))]


def _samples(samples: list[dict[str, Any]]) -> str:
    """First and last step's samples of training and validation."""
    parts = []
    for validation in (False, True):
        chosen = [record for record in samples if bool(record.get("validation")) == validation]
        present = sorted({record["step"] for record in chosen})
        for step in dict.fromkeys(present[:1] + present[-1:]):
            kind = "Validation" if validation else "Training"
            rows = "".join(_sample(record) for record in chosen if record["step"] == step)
            parts.append(f"<h3>{kind}, step {step}</h3>{rows}")
    return f"<h2>Samples</h2>{''.join(parts)}" if parts else ""


def _sample(record: dict[str, Any]) -> str:
    score = record.get("score")
    reward = "not scored" if score is None else f"reward {short(float(score))}"
    return (
        f'<article><div class="meta">{reward}, wanted {escape(str(record.get("gts")))}</div>'
        f"<pre>{escape(str(record.get('input', '')))}</pre>"
        f'<pre class="out">{escape(str(record.get("output", "")))}</pre></article>'
    )


def _settings(tree: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>"
        for key, value in _flat(tree, "")
    )
    return (
        f"<h2>Configuration</h2><details><summary>all keys</summary><table>{rows}</table></details>"
    )


def _flat(node: dict[str, Any], prefix: str):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
