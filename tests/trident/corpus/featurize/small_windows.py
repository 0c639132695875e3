"""Options for windows of a few tokens, and the tokenizer they are cut with."""

from __future__ import annotations

from typing import Any

from megatron.tokenizers.record import TokenizerRecord
from trident.corpus.featurize.featurize_corpus import WindowOptions

RECORD = TokenizerRecord("tiny", "abc", 600, 599)


def small(**changed: Any) -> WindowOptions:
    """Options for windows of 8 to 32 tokens."""
    return WindowOptions(**{"min_sequence_length": 8, "max_sequence_length": 32, "stride": 16, **changed})
