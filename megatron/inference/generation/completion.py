"""Whole texts: many requests at once, and the slow reference that every faster way must agree with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron import log
from megatron.evaluation.tasks.exact_match import before_stops
from megatron.inference.forward import Forward
from megatron.inference.generation.generation_engine import USUAL_SEQUENCES, GenerationEngine
from megatron.inference.generation.next_tokens import check_request, choose_on_all, finish_of, last_length
from megatron.inference.generation.request import Completion, Finish, GeneratedToken, Request
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Chooser, Sampling
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.messages import all_gather_json
from megatron.tokenizers.prompts import encode_prompt

_GREEDY = Sampling(greedy=True)


def generate_all(
    loaded: LoadedModel,
    requests: Sequence[Request],
    *,
    max_sequences: int = USUAL_SEQUENCES,
    speculative_tokens: int = 0,
) -> list[Completion]:
    """Continues all requests and returns their texts in the same order; collective over a model copy.

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
    """Continues all requests and yields their texts in the same order, each as early as possible; collective over a
    model copy. Says at the end what guessing tokens has brought, if any were guessed.

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


class LoadedCompleter:
    """Continues prompts over all ranks: each data-parallel replica continues some of them.

    Args:
        loaded: the checkpoint, opened on this rank's mesh.
        sampling: how tokens are chosen.
        keeps_blanks: whether blanks that an answer begins with are part of it, see `before_stops`.
    """

    def __init__(self, loaded: LoadedModel, sampling: Sampling = _GREEDY, *, keeps_blanks: bool = False) -> None:
        self.loaded = loaded
        self.sampling = sampling
        self.keeps_blanks = keeps_blanks

    def __call__(self, prompts: Sequence[str], max_new_tokens: int, stop_texts: Sequence[str]) -> list[str]:
        """The continuations of prompts, up to the first stop text, the end of the document or the most new tokens.

        A prompt that leaves no room for `max_new_tokens` loses its first tokens, but keeps half of the positions.
        Collective over all ranks, which pass the same prompts; the result is the same on every rank.
        """
        room = max(self.loaded.positions - max_new_tokens, self.loaded.positions // 2)
        encoded = [encode_prompt(self.loaded.tokenizer, prompt)[-room:] for prompt in prompts]
        return self.continue_tokens(encoded, max_new_tokens, stop_texts)

    def continue_tokens(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_texts: Sequence[str]
    ) -> list[str]:
        """The same for prompts that are tokens already, and are taken as they are."""
        replicas = self.loaded.mesh.batch
        own = [self._request(number, prompts[number], max_new_tokens) for number in range(len(prompts))]
        texts = self._texts(own[replicas.rank :: replicas.size], stop_texts)
        by_replica = all_gather_json(texts, replicas)
        return [by_replica[number % replicas.size][number // replicas.size] for number in range(len(prompts))]

    def _request(self, number: int, prompt: Sequence[int], max_new_tokens: int) -> Request:
        stops = frozenset(() if self.loaded.eod_id is None else (self.loaded.eod_id,))
        return Request(str(number), tuple(prompt), max_new_tokens, self.sampling, number, stop_ids=stops)

    def _texts(self, requests: Sequence[Request], stop_texts: Sequence[str]) -> list[str]:
        """The text of each request up to its first stop text, at which its generation ends."""
        engine = GenerationEngine(self.loaded)
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        texts = dict.fromkeys(tokens, "")
        for request in requests:
            engine.add(request)
        while not engine.is_idle:
            for one in engine.step():
                if one.token is None or one.finish == "stop":
                    continue
                tokens[one.request_id].append(one.token)
                text = self.loaded.tokenizer.decode(tokens[one.request_id])
                whole, cut = (before_stops(text, stops, keeps_blanks=self.keeps_blanks) for stops in ((), stop_texts))
                texts[one.request_id] = cut
                if cut != whole:
                    engine.cancel(one.request_id)
        return [texts[request.id] for request in requests]
