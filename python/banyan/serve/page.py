"""GET /: a page to try a checkpoint by hand. One file, no outside resources; a policy allows only its own parts."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from banyan.serve.context import Context

_FILE = Path(__file__).with_name("chat_page.html")


async def show(context: Context, request: Request, fields: dict[str, Any]) -> Response:
    text, policy = _page()
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers={**headers, "cache-control": "no-store"})


@cache
def _page() -> tuple[str, str]:
    """The page, and a policy that allows its script and style by their hashes."""
    text = _FILE.read_text(encoding="utf-8")
    parts = {
        name: _hash(re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[0])
        for name in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src '{parts['script']}'; style-src '{parts['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
