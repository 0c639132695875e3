"""Key-value caches: the tokens that attention receives, and the memory that texts take."""

from __future__ import annotations

import torch

from megatron.model.interface.key_value_cache import MixedCaches, TextCache


def states(*values: float) -> torch.Tensor:
    """Keys `[1, 2, s, 3]` of tokens that are told apart by their value."""
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3)


def test_a_text_takes_at_most_a_block_more_than_it_has_tokens() -> None:
    cache = TextCache(block_tokens=4)
    caches = MixedCaches([cache], [1])
    for token in range(11):
        for layer in (0, 1):
            (text,) = caches.append(layer, states(token), states(-token))
            assert text.keys[0, 0, :, 0].tolist() == list(range(token + 1))
            assert text.values[0, 1, :, 2].tolist() == [-earlier for earlier in range(token + 1)]
        caches.advance()
        bytes_of_a_token = 2 * 2 * 2 * 3 * 4  # layers, keys and values, heads, channels, float32
        assert cache.allocated_bytes == -(-(token + 1) // 4) * 4 * bytes_of_a_token
    cache.clear()
    assert (cache.length, cache.allocated_bytes) == (0, 0)


def test_mixed_texts_get_their_own_tokens() -> None:
    texts = [TextCache(2), TextCache(2), TextCache(2)]
    first = MixedCaches(texts[:2], [3, 1])
    first.append(0, states(1, 2, 3, 10), states(1, 2, 3, 10))
    first.advance()
    second = MixedCaches(texts, [1, 2, 1])
    found = second.append(0, states(4, 11, 12, 20), states(4, 11, 12, 20))
    assert [text.queries for text in found] == [1, 2, 1]
    assert [text.keys[0, 0, :, 0].tolist() for text in found] == [[1, 2, 3, 4], [10, 11, 12], [20]]
    assert second.length == 0 and [text.length for text in texts] == [3, 1, 0]
    second.advance()
    assert [text.length for text in texts] == [4, 3, 1]
