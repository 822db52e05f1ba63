"""Requests made from /openapi.json, valid and not, to every route at $BANYAN_URL, with the key $BANYAN_KEY.

What must hold: an answer with a status below 500, or a 503 on a route whose description lists 503;
JSON errors of the documented shape. Runs in build/peers/clients.
"""

from __future__ import annotations

import os

import schemathesis
from hypothesis import HealthCheck, settings

URL = os.environ["BANYAN_URL"]
HEADERS = (
    {"authorization": f"Bearer {os.environ['BANYAN_KEY']}"} if "BANYAN_KEY" in os.environ else {}
)
schema = schemathesis.openapi.from_url(URL + "/openapi.json")


def check_answer(response: schemathesis.Response, documented: set[str]) -> None:
    status = response.status_code
    assert status < 500 or (status == 503 and "503" in documented), (status, response.text[:400])
    if status == 503:
        assert "retry-after" in {name.lower() for name in response.headers}
    if 400 <= status < 500 and "json" in str(response.headers.get("content-type", "")):
        assert "error" in response.json(), response.text[:400]


@schema.parametrize()
@settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_route_breaks(case: schemathesis.Case) -> None:
    response = case.call(timeout=60, headers=HEADERS)
    documented = {str(status) for status in case.operation.definition.raw.get("responses", {})}
    check_answer(response, documented)
