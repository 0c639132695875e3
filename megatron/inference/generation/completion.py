"""Whole texts: many requests at once, and the slow reference implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron import log
from megatron.inference.forward import Forward
from megatron.inference.generation.generation_engine import USUAL_SEQUENCES, GenerationEngine
from megatron.inference.generation.next_tokens import check_request, choose_on_all, finish_of, last_length
from megatron.inference.generation.request import Completion, Finish, GeneratedToken, Request
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Chooser, Sampling
from megatron.model.interface.step_context import StepSettings

_GREEDY = Sampling(greedy=True)


def generate_all(
    loaded: LoadedModel,
    requests: Sequence[Request],
    *,
    max_sequences: int = USUAL_SEQUENCES,
    speculative_tokens: int = 0,
) -> list[Completion]:
    """Generates the texts of all requests, in their order; collective over a model copy.

    Raises:
        ConfigError: a request can never be served; nothing is generated then.
    """
    texts = completions(loaded, requests, max_sequences=max_sequences, speculative_tokens=speculative_tokens)
    return list(texts)


def completions(
    loaded: LoadedModel,
    requests: Sequence[Request],
    *,
    max_sequences: int = USUAL_SEQUENCES,
    speculative_tokens: int = 0,
) -> Iterator[Completion]:
    """Generates the texts of all requests and yields them in their order, each as early as possible; collective over a
    model copy. Logs the acceptance of speculative tokens at the end.

    Raises:
        ConfigError: a request can never be served; nothing is generated then.
    """
    engine = GenerationEngine(loaded, max_sequences=max_sequences, speculative_tokens=speculative_tokens)
    for request in requests:
        engine.add(request)
    generated: dict[str, list[GeneratedToken]] = {request.id: [] for request in requests}
    for request in requests:
        text = generated[request.id]
        while not text or text[-1].finish is None:
            for one in engine.step():
                generated[one.request_id].append(one)
        yield Completion.of(request, generated.pop(request.id))
    if speculative_tokens:
        log.info(engine.speculation.sentence)


@torch.inference_mode()
def recompute(loaded: LoadedModel, request: Request) -> Completion:
    """Continues one request without caches, recomputing the whole text for every token; the slow reference."""
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
