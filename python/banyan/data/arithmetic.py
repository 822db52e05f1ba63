"""The embedded data set: seeded arithmetic word problems with integer answers, in verl's columns.

Level 1 adds or subtracts within 20, level 2 multiplies (one factor up to 12, the other up to 10), level 3 takes two
steps. Every prompt opens with the same three worked examples, so a batch is a tree of two levels: the examples, the
question, then the responses. Beside verl's columns, `response` (the worked answer) serves `banyan sft`, and `chosen`
and `rejected` (the same with another operation, or another result) serve `banyan dpo`. Whether a problem belongs to
`train` or `test` is a function of its numbers alone: the numbers of a held-out problem never occur together in
training, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from banyan.errors import UserError

DATA_SOURCE = "banyan/arithmetic"
PREFIX = "arithmetic:"
LEVELS = (1, 2, 3)
_HELD_OUT_SHARE = 8  # one of so many number pairs is held out
_MOST_MISSES = 20_000  # draws in a row without a new problem: there are no more

_NAMES = (
    "Ada Ben Chloe Dan Eva Finn Grace Hugo Iris Jonas Kira Leo Mia Noah Olga Paul Rosa Sam Tess Uma Vera Will Yara Zoe"
).split()
_THINGS = (
    "apples books buttons cards coins cookies flowers marbles pencils plums shells stamps stickers stones tickets toys"
).split()
_ADD = (
    "{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?",
    "There are {a} {thing} on the table. {name} puts {b} more on it. How many {thing} are on the table?",
    "{name} buys {a} {thing} on Monday and {b} {thing} on Tuesday. How many {thing} is that in all?",
    "A box holds {a} {thing} and a bag holds {b} {thing}. How many {thing} are there together?",
    "{name} collected {a} {thing}. {other} collected {b} {thing}. How many {thing} did they collect in total?",
    "After getting {b} {thing} from {other}, how many {thing} does {name} have, starting with {a}?",
)
_SUBTRACT = (
    "{name} has {a} {thing} and gives {b} to {other}. How many {thing} does {name} have left?",
    "There were {a} {thing} in the basket. {name} took {b} out. How many {thing} are still in the basket?",
    "{name} needs {a} {thing} and already has {b}. How many more {thing} does {name} need?",
    "{name} had {a} {thing} but lost {b} of them. How many {thing} remain?",
    "{name} has {a} {thing}. {other} has {b} fewer. How many {thing} does {other} have?",
    "A shop had {a} {thing} and sold {b}. How many {thing} does the shop have now?",
)
_MULTIPLY = (
    "{name} has {a} bags with {b} {thing} in each. How many {thing} does {name} have?",
    "There are {a} rows of {b} {thing}. How many {thing} are there in all?",
    "{name} fills {a} boxes and puts {b} {thing} into each box. How many {thing} is that?",
    "Each of {a} friends brings {b} {thing}. How many {thing} do they bring together?",
    "{name} gets {b} {thing} every day. How many {thing} does {name} get in {a} days?",
)
_ADD_SUBTRACT = (
    "{name} has {a} {thing}, finds {b} more and then gives {c} to {other}. How many {thing} does {name} have now?",
    "There are {a} {thing} in a jar. {name} adds {b} and {other} takes {c}. How many {thing} are in the jar?",
    "A shop has {a} {thing}, gets {b} more and sells {c}. How many {thing} are left?",
)
_MULTIPLY_ADD = (
    "{name} has {a} boxes with {b} {thing} in each and {c} more in a bag. How many {thing} does {name} have?",
    "There are {a} rows of {b} {thing} and {c} {thing} beside them. How many {thing} are there in all?",
    "{name} gets {b} {thing} a day for {a} days, and {c} more from {other}. How many {thing} is that?",
)
_EXAMPLES = (
    ("Nina has 6 pears and picks 7 more. How many pears does Nina have now?", "6 + 7 = 13", "13"),
    (
        "Omar had 15 balloons and 4 of them flew away. How many balloons does Omar have left?",
        "15 - 4 = 11",
        "11",
    ),
    ("There are 3 plates with 5 nuts on each. How many nuts are there in all?", "3 * 5 = 15", "15"),
)
_EXAMPLE_NUMBERS = {("+", 6, 7), ("-", 15, 4), ("*", 3, 5)}


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer: the equation, then `#### ` and the result; and a wrong one."""

    question: str
    equation: str
    answer: int
    level: int
    wrong: str


def examples() -> list[dict[str, str]]:
    """The three worked examples as chat messages."""
    messages = []
    for question, equation, answer in _EXAMPLES:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"{equation}\n#### {answer}"})
    return messages


def generate(
    rows: int, seed: int, split: str = "train", levels: tuple[int, ...] = (1, 2)
) -> list[dict[str, Any]]:
    """`rows` different problems as data rows. Raises UserError where the levels do not hold so many."""
    unknown = [level for level in levels if level not in LEVELS]
    if rows < 1 or not levels or unknown:
        raise UserError(
            f"arithmetic: wanted rows >= 1 and levels out of {LEVELS}, got {rows} and {levels}"
        )
    source = random.Random(f"banyan arithmetic {seed} {split}")
    seen: set[str] = set()
    out: list[dict[str, Any]] = []
    misses = 0
    while len(out) < rows and misses < _MOST_MISSES:
        misses += 1
        level = source.choice(levels)
        operators, templates, numbers = _draw_numbers(source, level)
        key = (operators, *numbers)
        if key in _EXAMPLE_NUMBERS or _split_of(key) != split:
            continue
        question = _phrase(source, templates, numbers)
        if question in seen:
            continue
        misses = 0
        seen.add(question)
        equation, answer = _solve(operators, numbers)
        wrong = _wrong(question, operators, numbers)
        problem = Problem(question, f"{equation} = {answer}", answer, level, wrong)
        out.append(_row(problem, len(out), split))
    if len(out) < rows:
        raise UserError(
            f"arithmetic: wanted at most {len(out)} rows of levels {levels}, got {rows}"
        )
    return out


def from_name(name: str) -> list[dict[str, Any]]:
    """Rows of `arithmetic:SPLIT?rows=N&seed=S&levels=1,2`, the name that data.train_files takes."""
    split, _, query = name.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query))
    try:
        if split not in ("train", "test") or not options.keys() <= {"rows", "seed", "levels"}:
            raise ValueError(name)
        levels = tuple(int(level) for level in options.get("levels", "1,2").split(","))
        rows, seed = int(options.get("rows", 1000)), int(options.get("seed", 0))
    except ValueError as error:
        raise UserError(
            f"{name}: wanted {PREFIX}train or {PREFIX}test, then ?rows=N&seed=S&levels=1,2"
        ) from error
    return generate(rows, seed, split, levels)


def _split_of(numbers: tuple[Any, ...]) -> str:
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return "test" if digest[0] % _HELD_OUT_SHARE == 0 else "train"


def _wrong(question: str, operators: str, numbers: tuple[int, ...]) -> str:
    """A worked answer whose first operation or whose result is wrong; a function of the problem alone."""
    source = random.Random(f"banyan arithmetic wrong {question}")
    equation, answer = _solve(operators, numbers)
    result = answer
    if source.random() < 0.5:
        other = source.choice([operator for operator in "+-*" if operator != operators[0]])
        equation, result = _solve(other + operators[1:], numbers)
    while result == answer:
        result = max(0, answer + source.choice((-10, -3, -2, -1, 1, 2, 3, 10)))
    return f"{equation} = {result}\n#### {result}"


def _solve(operators: str, numbers: tuple[int, ...]) -> tuple[str, int]:
    """The equation's left side and its value."""
    equation, answer = f"{numbers[0]}", numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        equation += f" {operator} {number}"
        answer = {"+": answer + number, "-": answer - number, "*": answer * number}[operator]
    return equation, answer


def _draw_numbers(
    source: random.Random, level: int
) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Operators, phrasings and numbers; the equation is evaluated from left to right."""
    first = source.random() < 0.5
    if level == 1 and first:
        a = source.randint(1, 18)
        return "+", _ADD, (a, source.randint(1, 20 - a))
    if level == 1:
        a = source.randint(3, 20)
        return "-", _SUBTRACT, (a, source.randint(1, a - 1))
    if level == 2:
        return "*", _MULTIPLY, (source.randint(2, 12), source.randint(2, 10))
    if first:
        a, b = source.randint(2, 20), source.randint(2, 20)
        return "+-", _ADD_SUBTRACT, (a, b, source.randint(1, a + b - 1))
    return "*+", _MULTIPLY_ADD, (source.randint(2, 9), source.randint(2, 9), source.randint(2, 20))


def _phrase(source: random.Random, templates: tuple[str, ...], numbers: tuple[int, ...]) -> str:
    name, other = source.sample(_NAMES, 2)
    values = dict(zip("abc", numbers, strict=False))
    return source.choice(templates).format(
        name=name, other=other, thing=source.choice(_THINGS), **values
    )


def _row(problem: Problem, index: int, split: str) -> dict[str, Any]:
    worked = f"{problem.equation}\n#### {problem.answer}"
    return {
        "data_source": DATA_SOURCE,
        "prompt": [*examples(), {"role": "user", "content": problem.question}],
        "response": worked,
        "chosen": worked,
        "rejected": problem.wrong,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": worked,
            "question": problem.question,
            "level": problem.level,
        },
    }
