"""Talking to a checkpoint over HTTP: OpenAI's endpoints, a chat page, health and metrics.

One thread computes: it steps the generation engine (`execution.engine_loop`). Another runs asyncio and uvicorn: it
reads requests, queues them and writes answers. They share two queues and no other state. What a client may ask for is
defined in `requests`, which knows neither of the two. Only `web` and `network` import starlette and uvicorn, which are
optional.
"""
