"""Rows and a host for tests of training on given text, and the losses restated in plain PyTorch."""

from __future__ import annotations

import json
import random
from array import array

import oracle
import torch

VOCAB = 131
Sample = tuple[list[int], list[int]]  # tokens, scored


class Host:
    """Hands out the rows in order and keeps what is logged."""

    def __init__(self, train: list[list[Sample]], validation: list[list[Sample]] | None = None):
        self.data = {False: train, True: validation or []}
        self.next, self.metrics, self.lines = 0, {}, []

    def next_rows(self, count):
        rows = [(self.next + i) % len(self.data[False]) for i in range(count)]
        self.next += count
        return rows

    def examples(self, rows, validation):
        return [[(array("i", t), bytes(s)) for t, s in self.data[validation][row]] for row in rows]

    def log(self, step, metrics):
        self.metrics[step] = metrics

    def say(self, line):
        self.lines.append(line)

    def should_stop(self):
        return False

    def save_state(self):
        return str(self.next)

    def load_state(self, state):
        self.next = int(state)


def tree(trainer: str, num_train: int, num_val: int = 0, **changes) -> dict:
    """A resolved tree as the shell hands it to the core; `changes` are keys with __ for dots."""
    from banyan.config.resolve import resolve

    arguments = [
        f"{key.replace('__', '.')}={'null' if value is None else value}"
        for key, value in changes.items()
    ]
    base = ["data.train_files=unused.jsonl"]
    if "model__path" not in changes:
        base.append("model.path=unused")
    out = resolve([*base, *arguments], f"{trainer}_trainer", trainer=trainer).tree
    out["_shell"] = {"num_train_rows": num_train, "num_val_rows": num_val}
    return out


def config_json(trainer: str, **changes) -> str:
    return json.dumps(tree(trainer, 1, **changes))


def sft_rows(seed: int, shape: str) -> list[list[Sample]]:
    """Rows of `banyan sft`. Shapes:

    turns       chats of several turns, every assistant turn scored, one sample each
    resent      the same chats, each turn a sample of its own with the history sent again
    masks       samples that agree on tokens and differ on which of them are scored
    branches    rollouts that branch from each other at random places, scored behind the branch
    nothing     no token shared
    """
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(1, VOCAB) for _ in range(draw.randint(low, high))]

    system = ids(3, 8)
    rows: list[list[Sample]] = []
    for _ in range(5):
        if shape in ("turns", "resent"):
            tokens, scored, turns = list(system), [0] * len(system), []
            for _ in range(draw.randint(2, 4)):
                question, answer = ids(1, 6), ids(1, 7)
                tokens, scored = tokens + question + answer, scored + [0] * len(question)
                turns.append((list(tokens), [0] * (len(tokens) - len(answer)) + [1] * len(answer)))
                scored += [1] * len(answer)
            rows.append([(tokens, scored)] if shape == "turns" else turns)
        elif shape == "masks":
            tokens = rows[-1][0][0] if rows and draw.random() < 0.7 else system + ids(4, 20)
            tokens = tokens[: draw.randint(len(system) + 2, len(tokens))] + ids(0, 3)
            rows.append([(tokens, [int(draw.random() < 0.6) for _ in tokens[1:]] + [1])])
        elif shape == "branches":
            old = draw.choice(rows)[0][0] if rows else system
            cut = draw.randint(1, len(old))
            tokens = old[:cut] + ids(1, 12)
            rows.append([(tokens, [0] * cut + [1] * (len(tokens) - cut))])
        else:
            tokens = ids(5, 20)
            rows.append([(tokens, [0, 0] + [1] * (len(tokens) - 2))])
    return rows


def pair_rows(seed: int) -> list[list[Sample]]:
    """Pairs on shared prompts; one answer begins the other, one pair comes twice."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(1, VOCAB) for _ in range(draw.randint(low, high))]

    rows = []
    for prompt in (ids(4, 9), ids(2, 20)):
        for _ in range(3):
            answers = [ids(1, 12), ids(1, 12)]
            if draw.random() < 0.4:
                answers[1] = answers[0] + ids(1, 3)
            rows.append([(prompt + a, [0] * len(prompt) + [1] * len(a)) for a in answers])
    return [*rows, rows[2]]


def scored_log_probs(
    weights: dict, config: dict, rows: list[list[Sample]]
) -> list[list[torch.Tensor]]:
    """Per row and sample: log-probabilities of the scored tokens, from one padded batch."""
    samples = [sample for row in rows for sample in row]
    found = iter(oracle.log_probs(weights, config, [tokens for tokens, _ in samples])[0])
    return [
        [next(found)[torch.tensor(scored[1:], dtype=torch.bool)] for _, scored in row]
        for row in rows
    ]


def sft_loss(log_probs: list[list[torch.Tensor]]) -> torch.Tensor:
    return -torch.cat([values for row in log_probs for values in row]).mean()


def preference_loss(policy, reference, objective: str, beta: float, smoothing: float = 0.0):
    """Mean DPO or IPO loss of pairs of log-probabilities, and the margins of the rewards."""
    margins = [
        (p[0].sum() - r[0].sum()) - (p[1].sum() - r[1].sum())
        for p, r in zip(policy, reference, strict=True)
    ]
    h = torch.stack(margins)
    if objective == "ipo":
        return ((h - 1 / (2 * beta)) ** 2).mean(), beta * h
    right, wrong = (torch.nn.functional.logsigmoid(sign * beta * h) for sign in (1, -1))
    return -((1 - smoothing) * right + smoothing * wrong).mean(), beta * h


def rewards(weights: dict, config: dict, rows: list[list[Sample]]) -> torch.Tensor:
    """[pairs, 2]: the value head at the last token of each sample."""
    out = []
    for row in rows:
        for tokens, _ in row:
            hidden = oracle.hidden_states(weights, config, torch.tensor([tokens]))
            out.append(hidden[0, -1] @ weights["score.weight"][0])
    return torch.stack(out).view(-1, 2)
