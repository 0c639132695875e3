"""Which sequences a proof compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.networks import tiny_config
from tests.trident.convert.tiny_encoders import write_wordpiece_tokenizer
from tests.trident.convert.tiny_models import TOKENS
from trident.convert.hugging_face.proof_batches import described, proof_batches, proof_lengths

ENCODER = {"bidirectional": True, "masked_lm_head": True, "max_position_embeddings": 48}
ROPE = {"position_embedding_type": "rope", "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({"max_position_embeddings": 48}, [48]),
        ({"max_position_embeddings": 1024}, [64]),
        (ROPE, [64]),
        ({**ROPE, "attention_window": 7}, [64]),
        ({**ROPE, "attention_window": 500}, [64, 516]),
        ({**ROPE, "rope_scaling_type": "yarn", "rope_original_max_positions": 1024}, [64, 1040]),
        ({**ROPE, "rope_scaling_type": "llama3", "rope_original_max_positions": 24}, [24, 64]),
        ({**ROPE, "rope_scaling_type": "dynamic"}, [64, 4112]),
        ({**ROPE, "rope_scaling_type": "linear"}, [64]),
        ({"max_position_embeddings": 100, "attention_window": 500}, [64, 100]),
    ],
)
def test_sequences_are_longer_than_window_and_context(changes: dict[str, Any], lengths: list[int]) -> None:
    assert proof_lengths(tiny_config(**changes)) == lengths


def wordpiece(folder: Path) -> Tokenizer:
    write_wordpiece_tokenizer(folder)
    return build_tokenizer(TokenizerChoice("BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt")))


def test_an_encoder_is_given_masks_types_and_padding(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path)
    sizes = {**ENCODER, "vocab_size": TOKENS, "padded_vocab_size": TOKENS}
    mask = tokenizer.special_ids["[MASK]"]
    whole, padded = proof_batches(tiny_config(**sizes, token_types=2), tokenizer)
    assert whole.is_text is None and padded.is_text is not None and whole.tokens.shape == (2, 48)
    assert (whole.tokens[:, 1::7] == mask).all() and whole.positions.tolist() == list(range(48))
    assert padded.is_text.sum(1).tolist() == [36, 24] and padded.positions.tolist() == list(range(24))
    assert torch.equal(whole.tokens[padded.is_text], padded.tokens[padded.is_text])
    assert not padded.tokens[~padded.is_text].any()  # [PAD] is the first token
    assert whole.token_types is not None and whole.token_types.tolist() == [[0] * 24 + [1] * 24] * 2
    assert [row.get("text_tokens") for batch in (whole, padded) for row in described(batch)] == [None, None, 36, 24]
    alone, _ = proof_batches(tiny_config(**sizes), tokenizer)
    assert alone.token_types is None


def test_random_tokens_are_no_padding_where_positions_are_counted_from_it(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path)
    config = tiny_config(**ENCODER, vocab_size=8, padded_vocab_size=8)
    free, kept = (proof_batches(config, tokenizer, padding_id)[0].tokens[0] for padding_id in (None, 3))
    assert 3 in free.tolist() and 3 not in kept.tolist()
