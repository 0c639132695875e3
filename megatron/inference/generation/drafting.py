"""Speculative decoding: the first block of multi-token prediction drafts tokens, and the network verifies them.

A pass of the network over the last token of a text and its draft gives the scores after each of them. Tokens are chosen
after each in turn, exactly as without a draft, as long as they match it. So texts equal those without drafting, token
for token, whether greedy or sampled; each step only yields more tokens. A drafted token is accepted with its own
probability, as in rejection sampling of a deterministic draft.

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
    """Accepted tokens of a text that a step has computed.

    Attributes:
        cache: the text's cache, without these tokens.
        row: index of the first one's state among the step's states.
        following: the token after each of them.
        draft_tokens: number of tokens to draft after the last of these.
    """

    cache: TextCache
    row: int
    following: Sequence[int]
    draft_tokens: int = 0


class Drafter:
    """Drafts tokens; the block's keys and values are in the text's cache, like a further layer's.

    The block that predicts the token after the next one is applied repeatedly, to its own states.

    Args:
        most: most tokens to draft at once.

    Raises:
        ConfigError: the network has no such block, or its rotations depend on the length of a text.
    """

    def __init__(self, loaded: LoadedModel, most: int) -> None:
        model = loaded.config.model
        if not model.mtp_num_layers:
            raise ConfigError(
                f"--speculative-tokens {most} requires a checkpoint trained with multi-token prediction "
                f"(--mtp-num-layers), and {loaded.path} was not. Remove --speculative-tokens."
            )
        if model.rotations_fixed_up_to is not None:
            raise ConfigError(
                f"--speculative-tokens {most} cannot be combined with --rope-scaling-type {model.rope_scaling_type}, "
                "whose rotations depend on the length of the text. Remove --speculative-tokens."
            )
        self.most, self._loaded = most, loaded

    def draft(self, states: torch.Tensor | None, texts: Sequence[KnownTokens]) -> list[list[int]]:
        """Adds accepted tokens to the caches, and drafts the next ones; collective over a model copy.

        Shapes: states `[s, h]` on the last stage, None on the others.
        """
        counts = [len(text.following) for text in texts]
        rows = [row for text, count in zip(texts, counts, strict=True) for row in range(text.row, text.row + count)]
        hidden = None if states is None else states[rows]
        hidden = self._advance(hidden, [text.cache for text in texts], [text.following for text in texts])
        ends = torch.tensor(counts).cumsum(0).sub_(1).tolist()
        drafts: list[list[int]] = [[] for _ in texts]
        active = [index for index, text in enumerate(texts) if text.draft_tokens]
        hidden = None if hidden is None else hidden[[ends[index] for index in active]]
        while active:
            for index, token in zip(active, self._most_probable(hidden), strict=True):
                drafts[index].append(token)
            continues = [len(drafts[index]) < texts[index].draft_tokens for index in active]
            hidden = None if hidden is None else hidden[continues]
            active = [index for index, is_active in zip(active, continues, strict=True) if is_active]
            if active:
                last = [drafts[index][-1:] for index in active]
                hidden = self._advance(hidden, [texts[index].cache for index in active], last)
        for text, draft in zip(texts, drafts, strict=True):
            text.cache.length -= max(0, len(draft) - 1)  # drafted tokens leave the cache again
        return drafts

    def _advance(
        self, hidden: torch.Tensor | None, caches: Sequence[TextCache], following: Sequence[Sequence[int]]
    ) -> torch.Tensor | None:
        """Runs the block on tokens, and appends their keys and values to the caches. Shapes: `[n, h]` to the same."""
        counts, device = [len(tokens) for tokens in following], self._loaded.mesh.device
        mixed = MixedCaches(caches, counts)
        if hidden is not None:
            starts = [cache.length for cache in caches]
            positions = [start + index for start, count in zip(starts, counts, strict=True) for index in range(count)]
            context = StepContext(
                sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
                known_first_sample=0,
                position_ids=torch.tensor([positions], device=device),
                caches=mixed,
                texts=tuple(TextPart(count, start, start + count) for start, count in zip(starts, counts, strict=True)),
            )
            prediction: Any = self._loaded.model.layer(MULTI_TOKEN)
            tokens = torch.tensor([[token for tokens in following for token in tokens]], device=device)
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
    """Statistics of speculative decoding.

    Attributes:
        passes: passes over a text that chose tokens, counted per text.
        tokens: tokens chosen in them.
        guessed, accepted: drafted tokens, and accepted ones.
    """

    passes: int = 0
    tokens: int = 0
    guessed: int = 0
    accepted: int = 0

    def add(self, guessed: int, chosen: int) -> None:
        """Counts a pass over a text."""
        self.passes += 1
        self.tokens += chosen
        self.guessed += guessed
        self.accepted += chosen - 1

    @property
    def sentence(self) -> str:
        share, rate = self.accepted / max(1, self.guessed), self.tokens / max(1, self.passes)
        return f"{share:.1%} of {self.guessed} drafted tokens were accepted: {rate:.2f} tokens per pass over a text"
