"""Speculative decoding: the first block of multi-token prediction guesses tokens, and the network verifies them.

A pass of the network over the last token of a text and its guesses gives the scores after each of them. The token that
would have been chosen without guesses is chosen after each in turn, for as long as it is the one that was guessed. So
texts are the same as without guesses, token for token, whether they are greedy or drawn; only more tokens come at once.
A guess is accepted with its own probability, as by rejection sampling of guesses that are no draws themselves.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023; DeepSeek-AI, "DeepSeek-V3",
2024, section 5.4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.errors import ConfigError
from megatron.inference.forward import decide_on_all
from megatron.inference.loaded_model import LoadedModel
from megatron.model.gpt import MULTI_TOKEN, OUTPUT_LAYER
from megatron.model.interface.key_value_cache import MixedCaches, TextCache
from megatron.model.interface.step_context import StepContext, TextPart


@dataclass(frozen=True)
class KnownTokens:
    """Tokens of a text that a step has computed and that stay.

    Attributes:
        cache: of the text, without them.
        row: the place of the first among the states of the step.
        following: the tokens after each of them.
        wanted: how many tokens are to be guessed after the last of these.
    """

    cache: TextCache
    row: int
    following: Sequence[int]
    wanted: int = 0


class Drafter:
    """Guesses tokens; the block's keys and values of a text are in the cache of the text, as those of another layer.

    The block that predicts the token after the next one is used again for those after that, on its own states.

    Args:
        most: tokens that are guessed at once.

    Raises:
        ConfigError: the network has no such block, or its rotations depend on the length of a text.
    """

    def __init__(self, loaded: LoadedModel, most: int) -> None:
        model = loaded.config.model
        if not model.mtp_num_layers:
            raise ConfigError(
                f"--speculative-tokens {most}: the checkpoint in {loaded.path} was trained without multi-token "
                "prediction (--mtp-num-layers), which guesses the tokens. Drop --speculative-tokens."
            )
        if model.rotations_fixed_up_to is not None:
            raise ConfigError(
                f"--speculative-tokens {most} does not go with --rope-scaling-type {model.rope_scaling_type}, which "
                "rotates the tokens of a text by how long it is when they come. Drop --speculative-tokens."
            )
        self.most, self._loaded = most, loaded

    def draft(self, states: torch.Tensor | None, texts: Sequence[KnownTokens]) -> list[list[int]]:
        """Adds known tokens to the caches, and guesses those after them; collective over a model copy.

        Shapes: states `[s, h]` on the last stage, None on the others.
        """
        counts = [len(text.following) for text in texts]
        rows = [place for text, count in zip(texts, counts, strict=True) for place in range(text.row, text.row + count)]
        hidden = None if states is None else states[rows]
        hidden = self._advance(hidden, [text.cache for text in texts], [text.following for text in texts])
        ends = torch.tensor(counts).cumsum(0).sub_(1).tolist()
        guesses: list[list[int]] = [[] for _ in texts]
        going = [place for place, text in enumerate(texts) if text.wanted]
        hidden = None if hidden is None else hidden[[ends[place] for place in going]]
        while going:
            for place, token in zip(going, self._most_probable(hidden), strict=True):
                guesses[place].append(token)
            is_going = [len(guesses[place]) < texts[place].wanted for place in going]
            hidden = None if hidden is None else hidden[is_going]
            going = [place for place, goes_on in zip(going, is_going, strict=True) if goes_on]
            if going:
                last = [guesses[place][-1:] for place in going]
                hidden = self._advance(hidden, [texts[place].cache for place in going], last)
        for text, guessed in zip(texts, guesses, strict=True):
            text.cache.length -= max(0, len(guessed) - 1)  # what was computed of guesses is not known
        return guesses

    def _advance(
        self, hidden: torch.Tensor | None, caches: Sequence[TextCache], following: Sequence[Sequence[int]]
    ) -> torch.Tensor | None:
        """The block's states of tokens, whose keys and values join the caches. Shapes: `[n, h]` to the same."""
        counts, device = [len(tokens) for tokens in following], self._loaded.mesh.device
        mixed = MixedCaches(caches, counts)
        if hidden is not None:
            starts = [cache.length for cache in caches]
            positions = [start + place for start, count in zip(starts, counts, strict=True) for place in range(count)]
            context = StepContext(
                sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
                known_first_sample=0,
                position_ids=torch.tensor([positions], device=device),
                caches=mixed,
                texts=tuple(TextPart(count, start, start + count) for start, count in zip(starts, counts, strict=True)),
            )
            prediction: Any = self._loaded.model.layer(MULTI_TOKEN)
            tokens = torch.tensor([[token for own in following for token in own]], device=device)
            embedded = prediction.embedding(tokens, context)
            hidden = prediction.layers[0](hidden.unsqueeze(0), embedded, context)[0]
        mixed.advance()
        return hidden

    def _most_probable(self, hidden: torch.Tensor | None) -> list[int]:
        """The most probable token after each state, on all ranks. Shapes: `[n, h]`."""
        scores = None
        if hidden is not None:
            head: Any = self._loaded.model.layer(OUTPUT_LAYER)
            scores = head.logits(hidden.unsqueeze(0))[0]
        return list(decide_on_all(scores, self._loaded, lambda whole: whole.argmax(dim=-1).tolist()))


@dataclass
class Speculation:
    """What guessing has brought so far.

    Attributes:
        passes: passes over a text that chose tokens, each of which counts one.
        tokens: tokens that were chosen in them.
        guessed, accepted: guesses, and those that were chosen.
    """

    passes: int = 0
    tokens: int = 0
    guessed: int = 0
    accepted: int = 0

    def add(self, guessed: int, chosen: int) -> None:
        """Takes note of a pass over a text."""
        self.passes += 1
        self.tokens += chosen
        self.guessed += guessed
        self.accepted += chosen - 1

    @property
    def sentence(self) -> str:
        share, rate = self.accepted / max(1, self.guessed), self.tokens / max(1, self.passes)
        return f"{share:.1%} of {self.guessed} guessed tokens were accepted: {rate:.2f} tokens a pass over a text"
