"""Networks as `open_checkpoint` returns them, without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.config import LossConfig
from megatron.inference.generation import Completion, Request
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.architectures import build, config_of

GREEDY = Sampling(greedy=True)


def load(
    changes: dict[str, Any] | None = None,
    mesh: ParallelMesh | None = None,
    dtype: torch.dtype = torch.float32,
    objective: str = "causal",
) -> LoadedModel:
    """This rank's part of a small network of 101 words and 16 positions (more if `changes` say so)."""
    changes = {"init_method_std": 0.4, **(changes or {})}
    mesh = mesh or ParallelMesh.single()
    model = build(changes, mesh).eval().to(dtype)
    config: Any = SimpleNamespace(model=config_of(changes), loss=LossConfig(objective=objective))
    tokenizer: Any = SimpleNamespace(vocab_size=101)
    return LoadedModel(config, mesh, tokenizer, model, Path("nowhere"), 0)


def mixed_requests(
    count: int, *, longest: int = 11, new_tokens: int = 12, sampling: Sampling = GREEDY, seed: int = 1, **settings: Any
) -> list[Request]:
    """Requests whose prompts have 1 to `longest` random tokens."""
    draws = torch.Generator().manual_seed(seed)
    requests = []
    for number in range(count):
        length = int(torch.randint(1, longest + 1, (), generator=draws))
        prompt = tuple(torch.randint(0, 101, (length,), generator=draws).tolist())
        requests.append(Request(str(number), prompt, new_tokens, sampling, sample=number, **settings))
    return requests


def texts(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    """The tokens of every completion."""
    return [completion.tokens for completion in completions]
