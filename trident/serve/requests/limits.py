"""How much one client may ask of the server, and how much all of them together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on requests, connections and time; what exceeds one is refused with a message that names it.

    Args:
        body_bytes: of a request.
        json_depth: of nested arrays and objects in a body.
        new_tokens: of one choice; None leaves it to the positions of the model.
        sequences: choices of one request, over all of its prompts.
        queued_sequences: choices of all requests that wait or are computed.
        request_seconds: from the arrival of a request to the end of its answer.
        connections: open at the same time.
        header_bytes: of a request line and its headers.
        header_seconds: within which they must arrive.
        body_seconds: within which a body must arrive.
        idle_seconds: that a connection without a request stays open.
        stall_seconds: that a client may take to read what is buffered for it.
        stop_texts: of one request.
        stop_letters: of one of them.
        top_logprobs: alternatives shown for each token.
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
