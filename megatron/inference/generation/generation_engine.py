"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import torch

from megatron.errors import ConfigError
from megatron.inference.forward import Forward
from megatron.inference.generation.next_tokens import (
    Failed,
    check_request,
    choose_each_on_all,
    choose_on_all,
    finish_of,
    last_length,
    score_on_all,
)
from megatron.inference.generation.request import GeneratedToken, Request
from megatron.inference.generation.schedule import EngineLimits, Text, TextChunk, TextSchedule
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Chooser, Chosen
from megatron.model.interface.key_value_cache import MixedCaches, TextCache
from megatron.model.interface.step_context import StepContext

USUAL_SEQUENCES = 32


class GenerationEngine:
    """Continues many requests at once; each gets the tokens that it would get alone.

    A step computes the new tokens of all running texts in one forward pass: the last token of each text that is being
    continued, and chunks of the prompts that are new. The tokens follow each other in a batch of 1, so nothing is
    padded, and every text attends to itself only. The products of the other layers may round differently with other
    texts in the batch, by about 1e-6 of a score in float32 (1e-2 in bfloat16), and no more: a text changes only where
    its most probable tokens are that close, or a draw falls that close to the boundary between two tokens. Of equal
    scores the lowest token is chosen.

    A network that was trained with `--objective prefix` or `multitask` attends to a prompt in both directions.

    All ranks of a model copy call the same methods in the same order; one rank chooses the tokens, so that they are
    equal on all ranks whatever their scores. Not to be used from several threads at once.

    Args:
        max_sequences: texts that run at once; others wait.
        max_tokens: the most tokens of all running texts, each counted at its full length in whole blocks: what bounds
            the memory of the caches. By default as many as `max_sequences` texts of all positions have.
        isolates_failures: whether a request whose token cannot be chosen ends alone, as "failed", and the others
            continue. Otherwise `step` raises. The same on all ranks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_sequences: int = USUAL_SEQUENCES,
        max_tokens: int | None = None,
        isolates_failures: bool = False,
    ) -> None:
        for name, value in (("max_sequences", max_sequences), ("max_tokens", max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}. It must be at least 1.")
        self.loaded = loaded
        limits = EngineLimits(max_sequences, 0, short_context=loaded.config.model.short_context)
        room = max_sequences * limits.reserved(loaded.positions) if max_tokens is None else max_tokens
        self._limits = EngineLimits(
            max_sequences, room, whole_prompts=loaded.sees_prompts, short_context=limits.short_context
        )
        self._schedule = TextSchedule(self._limits)
        self._forward = Forward(loaded)
        self._cancelled: list[str] = []
        self._choose = choose_each_on_all if isolates_failures else choose_on_all

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits, and no cancellation is to be reported."""
        return not (self._schedule.running or self._schedule.waiting or self._cancelled)

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take on this rank."""
        return sum(text.cache.allocated_bytes for text in self._schedule.running)

    def check(self, request: Request) -> None:
        """Checks that the engine can serve a request, now or later.

        Raises:
            ConfigError: it can never be served, or its id is in use.
        """
        if request.id in self._schedule:
            raise ConfigError(f"Request {request.id} is being served already. Use another id.")
        check_request(request, self.loaded)
        needed = self._limits.reserved(last_length(request, self.loaded))
        if needed > self._limits.tokens:
            raise ConfigError(
                f"Request {request.id} may grow to {needed} tokens ({len(request.prompt)} of its prompt, at most "
                f"{request.max_new_tokens} new, in whole blocks), and the caches have room for {self._limits.tokens}. "
                f"Ask for fewer tokens, or raise max_tokens."
            )

    def add(self, request: Request) -> None:
        """Takes a request; it joins in one of the next steps.

        Raises:
            ConfigError: see `check`.
        """
        self.check(request)
        chooser = Chooser(request.sampling, request.prompt, request.sample, request.top_logprobs)
        cache = TextCache(self._limits.block_tokens, prefix=len(request.prompt) if self.loaded.sees_prompts else 0)
        last = last_length(request, self.loaded)
        self._schedule.waiting.append(Text(request, list(request.prompt), last, cache, chooser))

    def cancel(self, request_id: str) -> None:
        """Ends a request, which the next step reports as cancelled; does nothing if it has ended already."""
        text = self._schedule.find(request_id)
        if text is not None:
            self._schedule.remove(text)
            self._cancelled.append(request_id)

    @torch.inference_mode()
    def step(self) -> list[GeneratedToken]:
        """Computes one step; returns the new tokens, at most one per request.

        Raises:
            NumericsError: the network computes something that is not a number.
            RuntimeError: a token cannot be chosen, and failures are not isolated.
        """
        cancelled = [GeneratedToken(request_id, None, finish="cancelled") for request_id in self._cancelled]
        self._cancelled.clear()
        parts = self._schedule.next_parts()
        if not parts:
            return cancelled
        targets = [(part.text, token) for part in parts for _, token in part.targets]
        ready = [part.text for part in parts if part.is_last]
        scores, prompt_scores = self._run(parts)
        for part in parts:
            part.text.cache.length += part.count
        if targets:
            choosers = [text.chooser for text, _ in targets]
            scored = score_on_all(prompt_scores, [token for _, token in targets], choosers, self.loaded)
            for (text, _), one in zip(targets, scored, strict=True):
                text.scored.append(one)
        goes_on = [text for text in ready if text.request.max_new_tokens]
        ended = [self._end(text) for text in ready if not text.request.max_new_tokens]
        if not goes_on:
            return cancelled + ended
        if scores is not None and ended:
            scores = scores[[place for place, text in enumerate(ready) if text.request.max_new_tokens]]
        results = self._choose(scores, [text.chooser for text in goes_on], self.loaded)
        return cancelled + ended + [self._accept(text, chosen) for text, chosen in zip(goes_on, results, strict=True)]

    def _run(self, parts: list[TextChunk]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scores of the next tokens of the texts whose tokens are all computed, and of the tokens of prompts that are
        to be scored; None off the last stage.

        Shapes: results `[texts, v/t]` and `[targets, v/t]`.
        """
        device = self.loaded.mesh.device
        places = [part.place for part in parts]
        tokens = torch.tensor([[token for part in parts for token in part.tokens]], device=device)  # [1, s]
        positions = [range(place.first, place.first + place.count) for place in places]
        position_ids = torch.tensor([[position for run in positions for position in run]], device=device)  # [1, s]
        ends, rows, prompt_rows = 0, [], []
        for part in parts:
            prompt_rows += [ends + place for place, _ in part.targets]
            ends += part.count
            if part.is_last:
                rows.append(ends - 1)
        last = len(rows)
        rows += prompt_rows
        context = StepContext(
            sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
            known_first_sample=0,
            position_ids=position_ids,
            caches=MixedCaches([part.text.cache for part in parts], [part.count for part in parts]),
            texts=tuple(places),
        )
        chosen_rows = None if rows == list(range(ends)) else torch.tensor(rows, dtype=torch.int64, device=device)
        scores = self._forward(tokens, context, chosen_rows)
        if scores is None:
            return None, None
        scores = scores.flatten(0, -2)  # [n, v/t]
        return scores[:last], scores[last:]

    def _end(self, text: Text) -> GeneratedToken:
        """Ends a text whose request is for no new tokens."""
        self._schedule.remove(text)
        return GeneratedToken(text.request.id, None, finish="length", prompt=tuple(text.scored))

    def _accept(self, text: Text, chosen: Chosen | Failed) -> GeneratedToken:
        if isinstance(chosen, Failed):
            self._schedule.remove(text)
            return GeneratedToken(text.request.id, None, finish="failed", failure=chosen.reason)
        text.tokens.append(chosen.token)
        finish = finish_of(text.request, chosen.token, len(text.tokens), text.last_length)
        if finish is not None:
            self._schedule.remove(text)
        is_first = len(text.tokens) == len(text.request.prompt) + 1
        prompt = tuple(text.scored) if is_first else ()
        return GeneratedToken(text.request.id, chosen.token, chosen.logprob, chosen.top, finish, prompt=prompt)
