"""The slow reference that every faster way of generating must agree with."""

from __future__ import annotations

import torch

from megatron.inference.forward import Forward
from megatron.inference.generation.next_tokens import check_request, choose_on_all, finish_of, last_length
from megatron.inference.generation.request import Completion, Finish, GeneratedToken, Request
from megatron.inference.loading import LoadedModel
from megatron.inference.sampling.choosing import Chooser
from megatron.model.interface.step_context import StepSettings


@torch.inference_mode()
def recompute(loaded: LoadedModel, request: Request) -> Completion:
    """Continues one request without caches: the whole text is computed for every token. Slow; a reference."""
    check_request(request, loaded)
    forward, device = Forward(loaded), loaded.mesh.device
    chooser = Chooser(request.sampling, request.prompt, request.sample, request.top_logprobs)
    tokens, generated = list(request.prompt), []
    finish: Finish | None = None
    while finish is None:
        inputs = torch.tensor([tokens], device=device)  # [1, s]
        prefix = torch.arange(len(tokens), device=device)[None] < len(request.prompt)  # [1, s]
        context = StepSettings().context(
            torch.zeros(1, dtype=torch.int64, device=device),
            prefix_mask=prefix if loaded.sees_prompts else None,
            first_sample=0,
        )
        scores = forward(inputs, context, torch.tensor([len(tokens) - 1], device=device))
        (chosen,) = choose_on_all(scores, [chooser], loaded)
        tokens.append(chosen.token)
        finish = finish_of(request, chosen.token, len(tokens), last_length(request, loaded))
        generated.append(GeneratedToken(request.id, chosen.token, chosen.logprob, chosen.top, finish))
    return Completion.of(request, generated)
