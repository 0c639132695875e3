"""Beam search for the most probable texts; deterministic.

Source: transformers 5 `generation/utils.py`, `_beam_search`, for one prompt: the same texts and scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron.config.sampling_flags import LARGEST_LENGTH_PENALTY, MOST_BEAMS, BeamFlags
from megatron.errors import ConfigError, NumericsError, printable
from megatron.inference.forward import Forward, decide_on_all
from megatron.inference.loaded_model import LoadedModel
from megatron.model.interface.step_context import StepSettings

EarlyStopping = Literal["false", "true", "never"]


@dataclass(frozen=True, kw_only=True)
class BeamSettings:
    """The settings of a beam search.

    Args:
        beams: number of running texts, and of finished ones to keep.
        max_new_tokens: most tokens of a text, its stop token included.
        length_penalty: a finished text's score is its log-probability divided by its number of tokens to this power;
            above 0 it favors long texts.
        early_stopping: the end of the search, once `beams` texts are finished: "true" at once; "false" once no running
            beam can enter the top at its present length; "never" once none can at any length.
        returned: number of texts to return, best first.
        stop_ids: tokens that end a text.

    Raises:
        ConfigError: a value is out of bounds; all problems at once.
    """

    beams: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "false"
    returned: int = 1
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(problems)

    @classmethod
    def of_flags(
        cls, flags: BeamFlags, *, max_new_tokens: int, returned: int, stop_ids: frozenset[int]
    ) -> BeamSettings:
        return cls(
            beams=flags.num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=flags.length_penalty,
            early_stopping=flags.early_stopping,  # type: ignore[arg-type]  # one of its choices
            returned=returned,
            stop_ids=stop_ids,
        )

    def _problems(self) -> Iterator[str]:
        if not 1 <= self.beams <= MOST_BEAMS:
            yield f"beams is {printable(self.beams)}. It must be from 1 to {MOST_BEAMS}."
        if self.max_new_tokens < 1:
            yield f"max_new_tokens is {printable(self.max_new_tokens)}. It must be at least 1."
        if not abs(self.length_penalty) <= LARGEST_LENGTH_PENALTY:
            yield (
                f"length_penalty is {printable(self.length_penalty)}. It must be from -{LARGEST_LENGTH_PENALTY:.0f} to "
                f"{LARGEST_LENGTH_PENALTY:.0f}."
            )
        if self.early_stopping not in ("false", "true", "never"):
            yield f"early_stopping is {printable(self.early_stopping)}. It must be false, true or never."
        if not 1 <= self.returned <= self.beams:
            yield (
                f"{printable(self.returned)} texts were requested of {printable(self.beams)} beams. Return from 1 "
                f"to all of them, or search with more beams."
            )


@dataclass(frozen=True)
class Beam:
    """A finished text.

    Attributes:
        tokens: the generated tokens, without the stop token.
        score: log-probability of the text, its stop token included, divided by the number of tokens to the power of the
            length penalty.
        finish: "stop" or "length".
    """

    tokens: tuple[int, ...]
    score: float
    finish: Literal["stop", "length"]

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Beam:
        return cls(**{**values, "tokens": tuple(values["tokens"])})


@dataclass(frozen=True)
class Continuations:
    """The next tokens of the running texts.

    Attributes:
        parents: for each running text, the index of the previous text that it continues.
        tokens: its new token.
    """

    parents: list[int]
    tokens: list[int]


@dataclass
class Hypotheses:
    """The running and the finished texts of one search.

    Args:
        longest: maximum length of a text, in tokens.

    Attributes:
        running: tokens of the running texts, best first.
        finished: the best finished texts, best first, at most as many as beams.
    """

    settings: BeamSettings
    longest: int
    running: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    finished: list[Beam] = field(default_factory=list)
    _logprobs: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    def extend(self, logprobs: torch.Tensor) -> Continuations | None:
        """Adds the best next tokens; returns the continuations of the running texts, or None when the search is over.

        Shapes: logprobs `[n, v]` of the next tokens of the n running texts.
        """
        beams, stop_ids = self.settings.beams, self.settings.stop_ids
        totals = (self._logprobs.unsqueeze(1) + logprobs).flatten()  # [n * v]
        # Enough candidates that `beams` of them continue, even if the best ones of each text are stop tokens.
        values, indices = totals.topk(min(max(2, 1 + len(stop_ids)) * beams, int(totals.isfinite().sum())))
        continued, kept = Continuations([], []), []
        running: list[tuple[int, ...]] = []
        for rank, (index, total) in enumerate(zip(indices.tolist(), values.tolist(), strict=True)):
            parent, token = divmod(index, logprobs.shape[1])
            text = (*self.running[parent], token)
            is_stopped = token in stop_ids
            if is_stopped or len(text) >= self.longest:
                if rank < beams:  # lower candidates only fill up the running texts
                    self._finish(text, total, is_stopped)
            elif len(running) < beams:
                running.append(text)
                kept.append(rank)
                continued.parents.append(parent)
                continued.tokens.append(token)
        self.running, self._logprobs = running, values[kept]
        return continued if running and not self._is_over() else None

    def best(self) -> list[Beam]:
        return self.finished[: self.settings.returned]

    def _finish(self, text: tuple[int, ...], total: float, is_stopped: bool) -> None:
        score = total / len(text) ** self.settings.length_penalty
        beam = Beam(text[:-1], score, "stop") if is_stopped else Beam(text, score, "length")
        self.finished = sorted([*self.finished, beam], key=lambda one: -one.score)[: self.settings.beams]

    def _is_over(self) -> bool:
        """True if no running text can still enter the top."""
        settings = self.settings
        if len(self.finished) < settings.beams:
            return False
        if settings.early_stopping == "true":
            return True
        is_patient = settings.early_stopping == "never" and settings.length_penalty > 0
        length = self.longest if is_patient else len(self.running[0])
        reachable = float(self._logprobs[0]) / length**settings.length_penalty
        return reachable <= self.finished[-1].score


@torch.inference_mode()
def beam_search(loaded: LoadedModel, prompt: Sequence[int], settings: BeamSettings) -> list[Beam]:
    """Returns the best continuations of a prompt, best first; collective over a model copy, equal on all its ranks.

    Returns fewer than `settings.returned` only if the vocabulary allows no more.

    Raises:
        ConfigError: the prompt is empty or fills all positions.
        NumericsError: the network computed a value that is not finite.
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
        if cached <= short_context < length:  # beyond this length all keys are rotated differently
            caches.truncate(0)
            cached = 0
        context = StepSettings().context(torch.arange(len(texts), device=device), first_sample=0, caches=caches)
        fresh = texts[:, cached:]
        last_rows = torch.arange(1, len(texts) + 1, device=device) * fresh.shape[1] - 1
        cached = length
        answer = _extend_on_all(forward(fresh, context, last_rows), hypotheses, loaded)
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
    """Extends the hypotheses on the first rank of the last stage; returns the continuations or the result on all ranks.

    Shapes: scores `[n, v/t]` on the last stage, None on the others.

    Raises:
        NumericsError: the scores are not finite; on all ranks.
    """

    def decide(whole: torch.Tensor) -> dict[str, Any]:
        logprobs = whole.log_softmax(dim=-1)
        if not bool(logprobs.amax(dim=-1).isfinite().all()):
            raise NumericsError(
                "the scores of the next tokens are not finite. The weights of the checkpoint "
                "are not finite, or too large for the dtype: try --bf16 or float32."
            )
        continued = hypotheses.extend(logprobs)
        return {"beams": list(map(dataclasses.asdict, hypotheses.best()))} if continued is None else vars(continued)

    answer: dict[str, Any] = decide_on_all(scores, loaded, decide)
    return answer
