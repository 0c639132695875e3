"""Limits on the requests of one client and of all clients together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on requests, connections and time; a refusal names the bound that was exceeded.

    Args:
        body_bytes: size of a request body.
        json_depth: nesting of arrays and objects in a body.
        new_tokens: new tokens per choice; None for as many as the model has positions.
        sequences: choices of one request, over all its prompts.
        queued_sequences: choices of all waiting and running requests.
        request_seconds: from the arrival of a request to the end of its answer.
        connections: open connections.
        header_bytes: size of a request line and its headers.
        header_seconds: until the headers must have arrived.
        body_seconds: until a body must have arrived.
        idle_seconds: until a connection without a request is closed.
        stall_seconds: until a client must have read its buffered data.
        stop_texts: stop texts of one request.
        stop_letters: characters of one stop text.
        top_logprobs: alternatives listed for each token.
    """

    body_bytes: int = 1 << 20
    json_depth: int = 32
    new_tokens: int | None = None
    sequences: int = 64
    queued_sequences: int = 1024
    request_seconds: float = 600.0
    connections: int = 512
    header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 15.0
    stall_seconds: float = 30.0
    stop_texts: int = 16
    stop_letters: int = 256
    top_logprobs: int = 20
