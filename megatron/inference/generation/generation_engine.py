"""The generation engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron.errors import ConfigError
from megatron.inference.forward import Forward
from megatron.inference.generation.drafting import Drafter, KnownTokens, Speculation
from megatron.inference.generation.next_tokens import (
    FailedChoice,
    check_request,
    finish_of,
    last_length,
    raise_failures,
    score_on_all,
    verify_on_all,
)
from megatron.inference.generation.request import GeneratedToken, Request
from megatron.inference.generation.schedule import EngineLimits, Text, TextChunk, TextSchedule
from megatron.inference.loaded_model import LoadedModel
from megatron.inference.sampling import Chooser, TokenChoice
from megatron.model.interface.key_value_cache import MixedCaches, TextCache
from megatron.model.interface.step_context import StepContext

USUAL_SEQUENCES = 32


class GenerationEngine:
    """Generates many texts at once; each is the same as if generated alone.

    A step computes the new tokens of all running texts in one forward pass: the last token of each running text, and
    chunks of new prompts. The tokens are concatenated in a batch of 1, so nothing is padded; every text attends only
    to itself. Products of other layers may round differently with other texts in the batch, by about 1e-6 of a score in
    float32 (1e-2 in bfloat16): a text changes only if its most probable tokens are that close, or a draw falls that
    close to the boundary between two tokens. Among equal scores the lowest token is chosen.

    A network that was trained with `--objective prefix` or `multitask` attends to a prompt in both directions.

    All ranks of a model copy call the same methods in the same order; one rank chooses the tokens, so that all ranks
    have the same. Not thread-safe.

    Args:
        max_sequences: most running texts; others wait.
        max_tokens: most tokens of all running texts at their full lengths, in whole blocks, which bounds the memory of
            the caches. By default enough for `max_sequences` texts of all positions.
        isolates_failures: if a token cannot be chosen, end only its request as "failed". Otherwise `step` raises. The
            same on all ranks.
        speculative_tokens: tokens of each text to draft per step, see `Drafter`; does not change texts. 0 for none.

    Attributes:
        speculation: statistics of drafting.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_sequences: int = USUAL_SEQUENCES,
        max_tokens: int | None = None,
        isolates_failures: bool = False,
        speculative_tokens: int = 0,
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
        self.speculation = Speculation()
        self._drafter = Drafter(loaded, speculative_tokens) if speculative_tokens else None
        self._forward = Forward(loaded, keeps_states=self._drafter is not None)
        self._cancelled: list[str] = []
        self._isolates_failures = isolates_failures

    @property
    def is_idle(self) -> bool:
        """True if no request is running or waiting, and no cancellation has to be reported."""
        return not (self._schedule.running or self._schedule.waiting or self._cancelled)

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values on this rank, in bytes."""
        return sum(text.cache.allocated_bytes for text in self._schedule.running)

    def check(self, request: Request) -> None:
        """Checks that the engine can serve a request, now or later.

        Raises:
            ConfigError: the request can never be served, or its id is in use.
        """
        if request.id in self._schedule:
            raise ConfigError(f"Request {request.id} is being served already. Use another id.")
        check_request(request, self.loaded)
        needed = self._limits.reserved(last_length(request, self.loaded))
        if needed > self._limits.tokens:
            raise ConfigError(
                f"Request {request.id} may grow to {needed} tokens ({len(request.prompt)} of the prompt, at most "
                f"{request.max_new_tokens} new, in whole blocks), but the caches have room for {self._limits.tokens}. "
                f"Request fewer tokens, or raise max_tokens."
            )

    def add(self, request: Request) -> None:
        """Adds a request, which joins in one of the next steps.

        Raises:
            ConfigError: see `check`.
        """
        self.check(request)
        chooser = Chooser(request.sampling, request.prompt, request.sample, request.top_logprobs)
        cache = TextCache(self._limits.block_tokens, prefix=len(request.prompt) if self.loaded.sees_prompts else 0)
        last = last_length(request, self.loaded)
        self._schedule.waiting.append(Text(request, list(request.prompt), last, cache, chooser))

    def cancel(self, request_id: str) -> None:
        """Cancels a request; the next step reports it. No effect on a request that has ended."""
        text = self._schedule.find(request_id)
        if text is not None:
            self._schedule.remove(text)
            self._cancelled.append(request_id)

    @torch.inference_mode()
    def step(self) -> list[GeneratedToken]:
        """Runs one step; returns the new tokens: one per text, or more with accepted drafts, in order.

        Raises:
            NumericsError: the network computed a value that is not finite.
            RuntimeError: a token cannot be chosen, and failures are not isolated.
        """
        cancelled = [GeneratedToken(request_id, None, finish="cancelled") for request_id in self._cancelled]
        self._cancelled.clear()
        chunks = self._schedule.next_chunks()
        if not chunks:
            return cancelled
        targets = [(chunk.text, token) for chunk in chunks for _, token in chunk.targets]
        ready = [chunk for chunk in chunks if chunk.is_last]
        scores, prompt_scores = self._run(chunks)
        if targets:
            choosers = [text.chooser for text, _ in targets]
            scored = score_on_all(prompt_scores, [token for _, token in targets], choosers, self.loaded)
            for (text, _), one in zip(targets, scored, strict=True):
                text.scored.append(one)
        results = self._choose(scores, ready)
        self._advance(chunks, results)
        generated = [one for chunk in ready for one in self._accept(chunk.text, results.get(chunk.text.request.id, ()))]
        return cancelled + generated

    def _choose(
        self, scores: torch.Tensor | None, ready: Sequence[TextChunk]
    ) -> Mapping[str, Sequence[TokenChoice | FailedChoice]]:
        """The next tokens of each request for new tokens. Shapes: scores `[n, v/t]`, see `verify_on_all`."""
        continued = [chunk for chunk in ready if chunk.text.request.max_new_tokens]
        if not continued:
            return {}
        if scores is not None and len(continued) < len(ready):
            rows = [bool(chunk.text.request.max_new_tokens) for chunk in ready for _ in range(1 + len(chunk.draft))]
            scores = scores[rows]
        choosers, drafts = [chunk.text.chooser for chunk in continued], [chunk.draft for chunk in continued]
        results = verify_on_all(scores, choosers, drafts, self.loaded)
        if not self._isolates_failures:
            raise_failures(results)
        if self._drafter is not None:
            for draft, chosen in zip(drafts, results, strict=True):
                self.speculation.add(len(draft), len(chosen))
        return {chunk.text.request.id: chosen for chunk, chosen in zip(continued, results, strict=True)}

    def _advance(
        self, chunks: Sequence[TextChunk], results: Mapping[str, Sequence[TokenChoice | FailedChoice]]
    ) -> None:
        """Counts the accepted tokens in the caches, and drafts the next ones."""
        known, texts, row = [], [], 0
        for chunk in chunks:
            text, first = chunk.text, chunk.text.cache.length
            chosen = [one.token for one in results.get(text.request.id, ()) if isinstance(one, TokenChoice)]
            count = chunk.count + max(0, len(chosen) - 1)
            following = [*text.tokens[first + 1 : first + chunk.count + 1], *chosen]
            if self._drafter is None or len(following) < count:  # the token after the last one is unknown
                text.cache.length += count
            else:
                room = max(0, text.last_length - len(text.tokens) - len(chosen) - 1) if chosen else 0
                known.append(KnownTokens(text.cache, row, following, min(self._drafter.most, room)))
                texts.append(text)
            row += chunk.width
        if self._drafter is None or not known:
            return
        states = None if self._forward.states is None else self._forward.states.flatten(0, -2)
        for text, draft in zip(texts, self._drafter.draft(states, known), strict=True):
            text.draft = draft

    def _run(self, chunks: list[TextChunk]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scores of the next tokens of texts without pending tokens, also after each drafted token, and those of
        scored prompt tokens; None off the last stage.

        Shapes: results `[texts and drafted tokens, v/t]` and `[targets, v/t]`.
        """
        device = self.loaded.mesh.device
        texts = tuple(chunk.text_part for chunk in chunks)
        tokens = torch.tensor([[token for chunk in chunks for token in chunk.tokens]], device=device)  # [1, s]
        positions = [range(text.first, text.first + text.count) for text in texts]
        position_ids = torch.tensor([[position for run in positions for position in run]], device=device)  # [1, s]
        ends, rows, prompt_rows = 0, list[int](), list[int]()
        for chunk in chunks:
            prompt_rows += [ends + row for row, _ in chunk.targets]
            ends += chunk.width
            if chunk.is_last:
                rows += range(ends - len(chunk.draft) - 1, ends)
        last = len(rows)
        rows += prompt_rows
        context = StepContext(
            sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
            known_first_sample=0,
            position_ids=position_ids,
            caches=MixedCaches([chunk.text.cache for chunk in chunks], [chunk.width for chunk in chunks]),
            texts=texts,
        )
        chosen_rows = None if rows == list(range(ends)) else torch.tensor(rows, dtype=torch.int64, device=device)
        scores = self._forward(tokens, context, chosen_rows)
        if scores is None:
            return None, None
        scores = scores.flatten(0, -2)  # [n, v/t]
        return scores[:last], scores[last:]

    def _accept(self, text: Text, results: Sequence[TokenChoice | FailedChoice]) -> Iterator[GeneratedToken]:
        """Appends tokens to a text up to the one that ends it; ends a text whose request is only for scores."""
        if not results:
            self._schedule.remove(text)
            yield GeneratedToken(text.request.id, None, finish="length", prompt=tuple(text.scored))
        for chosen in results:
            if isinstance(chosen, FailedChoice):
                self._schedule.remove(text)
                yield GeneratedToken(text.request.id, None, finish="failed", failure=chosen.reason)
                return
            text.tokens.append(chosen.token)
            finish = finish_of(text.request, chosen.token, len(text.tokens), text.last_length)
            if finish is not None:
                self._schedule.remove(text)
            is_first = len(text.tokens) == len(text.request.prompt) + 1
            prompt = tuple(text.scored) if is_first else ()
            yield GeneratedToken(text.request.id, chosen.token, chosen.logprob, chosen.top, finish, prompt=prompt)
            if finish is not None:
                return
