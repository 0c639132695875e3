"""Continuous batching: requests of different lengths join and leave between the steps of one engine.

Every rank of a model copy runs the same engine with the same requests; `lead` and `follow` let rank 0 alone decide.
"""

from megatron.inference.generation.completion import completions, generate_all, recompute
from megatron.inference.generation.generation_engine import GenerationEngine
from megatron.inference.generation.ranks import Leader, follow, lead
from megatron.inference.generation.request import Completion, Finish, GeneratedToken, Request

__all__ = [
    "Completion",
    "Finish",
    "GeneratedToken",
    "GenerationEngine",
    "Leader",
    "Request",
    "completions",
    "follow",
    "generate_all",
    "lead",
    "recompute",
]
