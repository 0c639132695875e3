"""A checkpoint behind HTTP: OpenAI's endpoints, a chat page, health and metrics.

One thread steps the generation engine (`execution.engine_loop`). Another runs asyncio and uvicorn: it reads requests,
queues them and writes answers. They share two queues and no other state. `requests` defines and limits what a client
may send, independently of both. Only `web` and `network` import starlette and uvicorn, which are optional.
"""
