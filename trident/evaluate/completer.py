"""Continues the prompts of tasks with a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.inference.generation.generation_engine import GenerationEngine
from megatron.inference.generation.request import Request
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.parallel.messages import all_gather_json
from megatron.tokenizers.prompts import encode_prompt
from trident.evaluate.tasks.exact_match import before_stops

_GREEDY = Sampling(greedy=True)


class LoadedCompleter:
    """Continues prompts over all ranks: each data-parallel replica continues some of them.

    Args:
        loaded: the checkpoint, opened on this rank's mesh.
        sampling: sampling settings.
        keeps_blanks: keep leading blanks of an answer, see `before_stops`.
    """

    def __init__(self, loaded: LoadedModel, sampling: Sampling = _GREEDY, *, keeps_blanks: bool = False) -> None:
        self.loaded = loaded
        self.sampling = sampling
        self.keeps_blanks = keeps_blanks

    def __call__(self, prompts: Sequence[str], max_new_tokens: int, stop_texts: Sequence[str]) -> list[str]:
        """The continuations of prompts, up to the first stop text, the end of the document or the most new tokens.

        A prompt that leaves no room for `max_new_tokens` is truncated at its start, but keeps half of the positions.
        Collective over all ranks, which pass the same prompts; the result is the same on every rank.
        """
        room = max(self.loaded.positions - max_new_tokens, self.loaded.positions // 2)
        encoded = [encode_prompt(self.loaded.tokenizer, prompt)[-room:] for prompt in prompts]
        return self.continue_tokens(encoded, max_new_tokens, stop_texts)

    def continue_tokens(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_texts: Sequence[str]
    ) -> list[str]:
        """Continues prompts that are given as tokens."""
        replicas = self.loaded.mesh.batch
        requests = [self._request(number, prompts[number], max_new_tokens) for number in range(len(prompts))]
        texts = self._texts(requests[replicas.rank :: replicas.size], stop_texts)
        by_replica = all_gather_json(texts, replicas)
        return [by_replica[number % replicas.size][number // replicas.size] for number in range(len(prompts))]

    def _request(self, number: int, prompt: Sequence[int], max_new_tokens: int) -> Request:
        stops = frozenset(() if self.loaded.eod_id is None else (self.loaded.eod_id,))
        return Request(str(number), tuple(prompt), max_new_tokens, self.sampling, number, stop_ids=stops)

    def _texts(self, requests: Sequence[Request], stop_texts: Sequence[str]) -> list[str]:
        """The text of each request up to its first stop text, which ends its generation."""
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
