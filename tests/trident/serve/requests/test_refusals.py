"""Refusals have the status and the JSON that OpenAI's clients expect."""

from __future__ import annotations

import pytest

from trident.serve.requests import refusals
from trident.serve.requests.refusals import Refusal


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "code"),
    [
        (refusals.invalid("wrong", "n", "c"), 400, "invalid_request_error", "c"),
        (Refusal(401, "who?", code="invalid_api_key"), 401, "authentication_error", "invalid_api_key"),
        (Refusal(404, "what?"), 404, "invalid_request_error", None),
        (refusals.busy("full"), 503, "server_error", "overloaded"),
        (refusals.starting(), 503, "server_error", "starting"),
        (refusals.stopping(), 503, "server_error", "stopping"),
        (refusals.too_slow(2.5), 504, "server_error", "timeout"),
        (refusals.broken(), 500, "server_error", "internal_error"),
    ],
)
def test_status_type_and_code(refusal: Refusal, status: int, kind: str, code: str | None) -> None:
    error = refusal.to_json()["error"]
    assert (refusal.status, error["type"], error["code"]) == (status, kind, code)
    assert error["message"] == str(refusal) and set(error) == {"message", "type", "param", "code"}
    assert ("Retry-After" in refusal.headers) == (status == 503)
