"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron.errors import ConfigError
from megatron.inference.forward import Forward
from megatron.inference.generation.drafting import Drafter, KnownTokens, Speculation
from megatron.inference.generation.next_tokens import (
    Failed,
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
        speculative_tokens: how many tokens of each text are guessed ahead of a step, which verifies them: see
            `Drafter`. It changes no text. 0 guesses none.

    Attributes:
        speculation: what guessing has brought.
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
        """Computes one step; returns the new tokens, those of a request in their order: one, unless more were guessed.

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
        ready = [part for part in parts if part.is_last]
        scores, prompt_scores = self._run(parts)
        if targets:
            choosers = [text.chooser for text, _ in targets]
            scored = score_on_all(prompt_scores, [token for _, token in targets], choosers, self.loaded)
            for (text, _), one in zip(targets, scored, strict=True):
                text.scored.append(one)
        results = self._choose(scores, ready)
        self._advance(parts, results)
        generated = [one for part in ready for one in self._accept(part.text, results.get(part.text.request.id, ()))]
        return cancelled + generated

    def _choose(
        self, scores: torch.Tensor | None, ready: Sequence[TextChunk]
    ) -> Mapping[str, Sequence[Chosen | Failed]]:
        """The next tokens of each request that wants some. Shapes: scores `[n, v/t]`, see `verify_on_all`."""
        goes_on = [part for part in ready if part.text.request.max_new_tokens]
        if not goes_on:
            return {}
        if scores is not None and len(goes_on) < len(ready):
            wanted = [bool(part.text.request.max_new_tokens) for part in ready for _ in range(1 + len(part.draft))]
            scores = scores[wanted]
        choosers, drafts = [part.text.chooser for part in goes_on], [part.draft for part in goes_on]
        results = verify_on_all(scores, choosers, drafts, self.loaded)
        if not self._isolates_failures:
            raise_failures(results)
        if self._drafter is not None:
            for draft, chosen in zip(drafts, results, strict=True):
                self.speculation.add(len(draft), len(chosen))
        return {part.text.request.id: chosen for part, chosen in zip(goes_on, results, strict=True)}

    def _advance(self, parts: Sequence[TextChunk], results: Mapping[str, Sequence[Chosen | Failed]]) -> None:
        """Counts the tokens in the caches that stay, and guesses those that will follow."""
        known, texts, row = [], [], 0
        for part in parts:
            text, first = part.text, part.text.cache.length
            chosen = [one.token for one in results.get(text.request.id, ()) if isinstance(one, Chosen)]
            count = part.count + max(0, len(chosen) - 1)
            following = [*text.tokens[first + 1 : first + part.count + 1], *chosen]
            if self._drafter is None or len(following) < count:  # nothing follows the last one
                text.cache.length += count
            else:
                room = max(0, text.last_length - len(text.tokens) - len(chosen) - 1) if chosen else 0
                known.append(KnownTokens(text.cache, row, following, min(self._drafter.most, room)))
                texts.append(text)
            row += part.width
        if self._drafter is None or not known:
            return
        states = None if self._forward.states is None else self._forward.states.flatten(0, -2)
        for text, guessed in zip(texts, self._drafter.draft(states, known), strict=True):
            text.draft = guessed

    def _run(self, parts: list[TextChunk]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scores of the next tokens of the texts whose tokens are all computed, also after each guess, and of the
        tokens of prompts that are to be scored; None off the last stage.

        Shapes: results `[texts and guesses, v/t]` and `[targets, v/t]`.
        """
        device = self.loaded.mesh.device
        places = [part.place for part in parts]
        tokens = torch.tensor([[token for part in parts for token in part.tokens]], device=device)  # [1, s]
        positions = [range(place.first, place.first + place.count) for place in places]
        position_ids = torch.tensor([[position for run in positions for position in run]], device=device)  # [1, s]
        ends, rows, prompt_rows = 0, list[int](), list[int]()
        for part in parts:
            prompt_rows += [ends + place for place, _ in part.targets]
            ends += part.width
            if part.is_last:
                rows += range(ends - len(part.draft) - 1, ends)
        last = len(rows)
        rows += prompt_rows
        context = StepContext(
            sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
            known_first_sample=0,
            position_ids=position_ids,
            caches=MixedCaches([part.text.cache for part in parts], [part.width for part in parts]),
            texts=tuple(places),
        )
        chosen_rows = None if rows == list(range(ends)) else torch.tensor(rows, dtype=torch.int64, device=device)
        scores = self._forward(tokens, context, chosen_rows)
        if scores is None:
            return None, None
        scores = scores.flatten(0, -2)  # [n, v/t]
        return scores[:last], scores[last:]

    def _accept(self, text: Text, results: Sequence[Chosen | Failed]) -> Iterator[GeneratedToken]:
        """Adds tokens to a text up to the one that ends it; ends a text whose request is for no new tokens."""
        if not results:
            self._schedule.remove(text)
            yield GeneratedToken(text.request.id, None, finish="length", prompt=tuple(text.scored))
        for chosen in results:
            if isinstance(chosen, Failed):
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
