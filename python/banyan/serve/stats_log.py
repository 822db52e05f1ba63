"""A line of figures in the log every ten seconds while there is work (off with disable_log_stats)."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from banyan.serve.context import Context

_log = logging.getLogger("banyan.serve")
_SECONDS = 10.0


async def log_stats(context: Context) -> None:
    """Runs until it is cancelled."""
    before, began = await context.engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(_SECONDS)
        after, now = await context.engine.stats(), time.monotonic()
        text = line(before, after, now - began)
        if text:
            _log.info(text)
        before, began = after, now


def line(before: dict[str, Any], after: dict[str, Any], seconds: float) -> str:
    """What happened between two readings of EngineStats; empty if nothing did."""

    def rate(name: str) -> float:
        counters = (after.get("counters", {}).get(name, 0), before.get("counters", {}).get(name, 0))
        return (counters[0] - counters[1]) / seconds

    drawn, read = rate("generation_tokens"), rate("prompt_tokens")
    if not drawn and not read and not after.get("running"):
        return ""
    pages = after.get("num_pages", 0)
    used = 100 * after.get("used_pages", 0) / pages if pages else 0.0
    return (
        f"prompt tokens/s {read:.0f}, drawn tokens/s {drawn:.0f}, running {after.get('running', 0)}, "
        f"waiting {after.get('waiting', 0)}, KV pages in use {used:.0f} %"
    )
