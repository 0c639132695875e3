"""The clients of benchmarks/serve.py, in a process that imports nothing that would slow its start.

Reads from standard input: the address, the number of new tokens, and the prompts of each client. Prints what
`Outcome` of benchmarks/serve.py holds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx


async def be_clients(order: dict[str, Any]) -> dict[str, Any]:
    """Sends the requests of all clients, each after the answer to the one before, and reads the streams."""
    first: list[float] = []
    further: list[float] = []
    counts: list[int] = []
    new_tokens = order["new_tokens"]

    async def client(http: httpx.AsyncClient, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in prompts:
            asked_at, first_at, tokens = time.perf_counter(), 0.0, 0
            body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
            # The server counts the tokens: several may be in one event, as parts of one character.
            body["stream_options"] = {"include_usage": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not first_at and '"text"' in line:
                        first_at = time.perf_counter()
                    elif '"usage"' in line:
                        tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
            first.append(first_at - asked_at)
            further.append((time.perf_counter() - first_at) / (new_tokens - 1))
            counts.append(tokens)

    async with httpx.AsyncClient(base_url=order["address"], timeout=600) as http:
        await http.get("/health")
        started_at = time.perf_counter()
        await asyncio.gather(*(client(http, prompts) for prompts in order["prompts"]))
        seconds = time.perf_counter() - started_at
    return {"tokens": sum(counts), "seconds": seconds, "first_seconds": first, "token_seconds": further}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(be_clients(json.load(sys.stdin)))))
