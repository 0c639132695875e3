"""A token file of sentences with its WordPiece vocabulary, and a command line small enough to train in a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.formats.indexed_writer import IndexedWriter

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]")
_WORDS = 80


@dataclass(frozen=True)
class TinySentences:
    """Files of a corpus whose sentences count upwards with gaps, so that there is something to learn."""

    folder: Path
    prefix: str
    vocab_file: str

    def flags(self, *more: str, **changes: Any) -> list[str]:
        """The command line of a tiny run of `pretrain_bert.py`; None drops a flag."""
        pairs: dict[str, Any] = {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "seq_length": 32,
            "max_position_embeddings": 32,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "train_iters": 6,
            "lr": 5e-3,
            "log_interval": 1,
            "eval_iters": 1,
            "split": "80,20,0",
            "data_path": self.prefix,
            "vocab_file": self.vocab_file,
            "data_cache_path": self.folder / "cache",
            **changes,
        }
        named = {"--" + name.replace("_", "-"): value for name, value in pairs.items() if value is not None}
        return [*(str(word) for pair in named.items() for word in pair), *more]


def write_tiny_sentences(folder: Path, documents: int = 40, seed: int = 5) -> TinySentences:
    """Writes the corpus into a folder; every third word has a second piece."""
    words = [f"word{number}" for number in range(_WORDS)]
    pieces = [f"##{number}" for number in range(_WORDS // 3)]
    vocab_file = folder / "bert-vocab.txt"
    vocab_file.write_text("\n".join([*_SPECIAL, *words, *pieces]) + "\n")
    drawn, prefix = np.random.default_rng(seed), str(folder / "tiny_text_sentence")
    first = len(_SPECIAL)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            sentences = []
            for _ in range(int(drawn.integers(2, 7))):
                length, start, stride = (int(drawn.integers(low, high)) for low, high in ((3, 9), (0, _WORDS), (1, 4)))
                body = (start + stride * np.arange(length)) % _WORDS
                pairs = ([first + n] + ([first + _WORDS + n // 3 % len(pieces)] if n % 3 == 0 else []) for n in body)
                sentences.append(np.array([token for pair in pairs for token in pair]))
            writer.add_document(sentences)
    return TinySentences(folder, prefix, str(vocab_file))
