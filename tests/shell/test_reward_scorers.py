"""The built-in scorers and their registry."""

from __future__ import annotations

import pytest
from banyan.errors import UserError
from banyan.reward import registry
from banyan.reward.scorers import arithmetic, gsm8k
from banyan.reward.scorers.competition_math import last_boxed, score_row


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so #### 42", "42", 1, 1),
        ("so #### 42.", "42", 0, 1),  # T39: the dot is part of the strict answer
        ("so #### 42.0", "42", 0, 1),
        ("#### 41 then #### 42", "42", 1, 1),
        ("#### 42 and 7 more", "42", 1, 0),
        ("#### 1,000", "1000", 1, 1),
        ("it costs $1,000.", "1000", 0, 1),
        ("####42", "42", 0, 1),
        ("#### -3", "-3", 1, 1),
        ("#### $5", "5", 0, 1),
        ("no number", "5", 0, 0),
        ("... , .", "5", 0, 0),
        ("#### 42" + " " * 300, "42", 0, 0),  # outside the last 300 characters
        ("é" * 500 + "#### 42", "42", 1, 1),
        ("#### 1.2.3", "1.2.3", 1, 0),
    ],
)
def test_gsm8k(text: str, truth: str, strict: int, flexible: int) -> None:
    assert gsm8k.compute_score(text, truth) == strict
    assert gsm8k.compute_score(text, truth, method="flexible") == flexible


def test_gsm8k_format_score() -> None:
    assert gsm8k.compute_score("#### 5", "6", format_score=0.1) == 0.1
    assert gsm8k.compute_score("five", "5", format_score=0.1) == 0.0
    assert gsm8k.compute_score("#### 5", "5", score=2.0) == 2.0
    with pytest.raises(ValueError, match="strict or flexible"):
        gsm8k.extract("#### 5", "loose")


def test_arithmetic_takes_integers_and_text() -> None:
    assert arithmetic.score_row("3 + 4 = 7\n#### 7", 7, {}) == 1.0
    assert arithmetic.score_row("3 + 4 = 7\n#### 7", "7", {}) == 1.0
    assert arithmetic.score_row("3 + 4 = 8\n#### 8", 7, {}) == 0.0


def test_boxed() -> None:
    assert last_boxed(r"\boxed{1} or \boxed{\frac{1}{2}} end") == r"\boxed{\frac{1}{2}}"
    assert last_boxed(r"\boxed{1") is None
    assert last_boxed("1") is None


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"thus \boxed{\frac12}", r"\frac{1}{2}", 1.0),
        (r"thus \boxed{3}", "4", 0.0),
        ("thus 3", "3", 0.0),
    ],
)
def test_competition_math(text: str, truth: str, score: float) -> None:
    assert score_row(text, truth, {}) == score


def test_registry() -> None:
    assert {"openai/gsm8k", "banyan/arithmetic", "lighteval/MATH"} <= set(registry.known())
    with pytest.raises(UserError, match="wanted one of"):
        registry.find("openai/gsm8k2")
    with pytest.raises(ValueError, match="twice"):
        registry.scorer("openai/gsm8k")(lambda *arguments: 0.0)
    try:
        registry.scorer("test/wild*")(lambda *arguments: 3.0)
        assert registry.find("test/wilder")("", "", {}) == 3.0
    finally:
        registry._scorers.pop("test/wild*")
