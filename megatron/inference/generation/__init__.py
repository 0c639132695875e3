"""Continuous batching: requests of different lengths join and leave between the steps of one engine.

Every rank of a model copy runs the same engine on the same requests, which rank 0 chooses (`drive`).
"""

from megatron.inference.generation.completion import completions, generate_all, recompute
from megatron.inference.generation.generation_engine import GenerationEngine
from megatron.inference.generation.ranks import Driver, drive, serve_as_worker
from megatron.inference.generation.request import Completion, Finish, GeneratedToken, Request

__all__ = [
    "Completion",
    "Driver",
    "Finish",
    "GeneratedToken",
    "GenerationEngine",
    "Request",
    "completions",
    "drive",
    "generate_all",
    "recompute",
    "serve_as_worker",
]
