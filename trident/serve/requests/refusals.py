"""Refusals of requests: the HTTP status, and the reason as the JSON that OpenAI's clients expect.

Source: https://platform.openai.com/docs/guides/error-codes; the object is `{"error": {message, type, param, code}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """The reason why a request is not carried out.

    Args:
        status: HTTP status.
        message: names the value and the way out.
        parameter: the field at fault.
        code: error code for programs.
        headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, INVALID if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


def invalid(message: str, parameter: str | None = None, code: str | None = None) -> Refusal:
    """An invalid request."""
    return Refusal(400, message, parameter, code)


def busy(message: str) -> Refusal:
    """A valid request that exceeds the server's present capacity."""
    return Refusal(503, message, code="overloaded", headers={"Retry-After": "1"})


def stopping() -> Refusal:
    """A request to a server that is shutting down."""
    return Refusal(503, "The server is stopping. Try again later.", code="stopping", headers={"Retry-After": "5"})


def starting() -> Refusal:
    """A request to a server that has not loaded its checkpoint yet."""
    return Refusal(
        503, "The checkpoint is being loaded. Try again soon.", code="starting", headers={"Retry-After": "2"}
    )


def too_slow(seconds: float) -> Refusal:
    """A request that exceeded its time limit."""
    return Refusal(504, f"The answer was not complete within {seconds:g} s. Request fewer tokens.", code="timeout")


def broken() -> Refusal:
    """An internal error; only the server's log has the details."""
    return Refusal(500, "The server failed to carry out the request; its log has the reason.", code="internal_error")
