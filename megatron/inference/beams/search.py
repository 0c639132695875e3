"""Beam search with a loaded network, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.errors import ConfigError, NumericsError
from megatron.inference.beams.hypotheses import Beam, BeamSettings, Hypotheses, beams_as_json
from megatron.inference.forward import Forward
from megatron.inference.loading import LoadedModel
from megatron.model.gpt import whole_logits
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.messages import broadcast_json


@torch.inference_mode()
def beam_search(loaded: LoadedModel, prompt: Sequence[int], settings: BeamSettings) -> list[Beam]:
    """The best continuations of a prompt, best first; collective over a model copy, and equal on all its ranks.

    Fewer than `settings.returned` come back only if the vocabulary has fewer.

    Raises:
        ConfigError: the prompt is empty or fills all positions.
        NumericsError: the network computes something that is not a number.
    """
    device, pad = loaded.mesh.device, len(prompt)
    _check_prompt(pad, loaded.positions)
    longest = min(settings.max_new_tokens, loaded.positions - pad)
    hypotheses = Hypotheses(settings, longest)
    forward, caches = Forward(loaded), loaded.model.new_caches(pad + longest, pad if loaded.sees_prompts else 0)
    texts = torch.tensor([list(prompt)], dtype=torch.int64, device=device)  # [n, s], equal on all ranks
    cached, short_context = 0, loaded.config.model.short_context or 0
    while True:
        length = texts.shape[1]
        if cached <= short_context < length:  # from here on, the keys of all tokens are rotated otherwise
            caches.truncate(0)
            cached = 0
        context = StepSettings().context(torch.arange(len(texts), device=device), first_sample=0, caches=caches)
        fresh = texts[:, cached:]
        last_places = torch.arange(1, len(texts) + 1, device=device) * fresh.shape[1] - 1
        cached = length
        answer = _extend_on_all(forward(fresh, context, last_places), hypotheses, loaded)
        if "beams" in answer:
            return [Beam.of_json(beam) for beam in answer["beams"]]
        parents = torch.tensor(answer["parents"], device=device)  # [n]
        caches.select(parents)
        texts = torch.cat([texts[parents], torch.tensor(answer["tokens"], device=device).unsqueeze(1)], dim=1)


def _check_prompt(length: int, positions: int) -> None:
    if length == 0:
        raise ConfigError("the prompt of a beam search has no tokens. Give at least one.")
    if length >= positions:
        raise ConfigError(
            f"the prompt of a beam search has {length} tokens, and the model has {positions} positions "
            f"(--max-position-embeddings {positions}). Shorten it to at most {positions - 1}."
        )


def _extend_on_all(scores: torch.Tensor | None, hypotheses: Hypotheses, loaded: LoadedModel) -> dict[str, Any]:
    """Extends the hypotheses on the first rank of the last stage; all ranks learn how it goes on, or the result.

    Shapes: scores `[n, v/t]` on the last stage, None on the others.

    Raises:
        NumericsError: the scores are not numbers; on all ranks.
    """
    mesh = loaded.mesh
    answer: dict[str, Any] = {}
    if scores is not None:
        whole = whole_logits(scores, mesh.tp, loaded.vocab_size).to("cpu", torch.float32)  # [n, v]
        if mesh.tp.rank == 0:
            logprobs = whole.log_softmax(dim=-1)
            if not bool(logprobs.amax(dim=-1).isfinite().all()):
                answer["failure"] = (
                    "the scores of the next tokens are not finite, so no text is the best. The weights of the "
                    "checkpoint are not finite, or too large for the dtype: try --bf16 or float32."
                )
            elif (continued := hypotheses.extend(logprobs)) is not None:
                answer = vars(continued)
            else:
                answer["beams"] = beams_as_json(hypotheses.best())
    if mesh.model.size > 1:
        answer = broadcast_json(answer, mesh.model, source=(mesh.pp.size - 1) * mesh.tp.size)
    if "failure" in answer:
        raise NumericsError(answer["failure"])
    return answer
