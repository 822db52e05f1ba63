"""A regular expression for the whole numbers between two bounds, either of which may be missing.

A range of numbers with equally many digits is cut at the first digit where its ends differ: the lower end's digit with
what is at least its rest, the digits between with anything, the upper end's digit with what is at most its rest.
"""

from __future__ import annotations


def integer_pattern(low: int | None, high: int | None) -> str:
    """Numbers as JSON writes them: no leading zeros, no plus, no -0. Raises ValueError for an empty range."""
    if low is not None and high is not None and low > high:
        raise ValueError(f"no whole number is between {low} and {high}")
    parts = []
    if low is None or low < 0:
        nearest = 1 if high is None or high >= 0 else -high
        parts.append("-(?:" + _natural(nearest, None if low is None else -low) + ")")
    if high is None or high >= 0:
        parts.append(_natural(max(0, low or 0), high))
    return "(?:" + "|".join(parts) + ")"


def _natural(low: int, high: int | None) -> str:
    """Alternatives for low..high, 0 <= low <= high."""
    parts = []
    digits = len(str(low))
    while high is None or digits <= len(str(high)):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        if high is None and first > low:
            parts.append(f"[1-9][0-9]{{{digits - 1},}}")
            break
        last = 10**digits - 1 if high is None else min(high, 10**digits - 1)
        parts.append(_same_length(str(first), str(last)))
        digits += 1
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    if not low:
        return ""
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return _digit(low[0], high[0]) + _any(len(low) - 1)
    if low[0] == high[0]:
        return low[0] + _group(_same_length(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [low[0] + _group(_same_length(low[1:], "9" * rest))]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(_digit(str(int(low[0]) + 1), str(int(high[0]) - 1)) + _any(rest))
    parts.append(high[0] + _group(_same_length("0" * rest, high[1:])))
    return "|".join(parts)


def _group(pattern: str) -> str:
    return f"(?:{pattern})" if "|" in pattern else pattern


def _digit(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _any(count: int) -> str:
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"
