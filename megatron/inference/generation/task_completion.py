"""Greedy answers of a loaded checkpoint, for tasks that compare generated text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.evaluation.tasks.exact_match import before_stops
from megatron.inference.generation.completion import generate_all
from megatron.inference.generation.request import Request
from megatron.inference.loading import LoadedModel
from megatron.inference.sampling import Sampling
from megatron.parallel.messages import all_gather_json


class LoadedCompleter:
    """Continues prompts greedily, over all ranks: each data-parallel replica continues some of them.

    Args:
        loaded: the checkpoint, opened on this rank's mesh.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def __call__(self, prompts: Sequence[str], max_new_tokens: int, stop_texts: Sequence[str]) -> list[str]:
        """The continuations of prompts, up to the first stop text, the end of the document or the most new tokens.

        A prompt that leaves no room for `max_new_tokens` loses its first tokens, but keeps half of the positions.
        Collective over all ranks, which pass the same prompts; the result is the same on every rank.
        """
        replicas = self.loaded.mesh.batch
        own = [self._request(number, prompts[number], max_new_tokens) for number in range(len(prompts))]
        done = generate_all(self.loaded, own[replicas.rank :: replicas.size])
        texts = [self.loaded.tokenizer.decode(completion.tokens) for completion in done]
        by_replica = all_gather_json(texts, replicas)
        return [
            before_stops(by_replica[number % replicas.size][number // replicas.size], stop_texts)
            for number in range(len(prompts))
        ]

    def _request(self, number: int, prompt: str, max_new_tokens: int) -> Request:
        eod_id = self.loaded.eod_id
        start = [] if eod_id is None else [eod_id]
        room = max(self.loaded.positions - max_new_tokens, self.loaded.positions // 2)
        tokens = self.loaded.tokenizer.encode(prompt)[-room:] or start
        stops = frozenset(start)
        return Request(str(number), tuple(tokens), max_new_tokens, Sampling(greedy=True), stop_ids=stops)
