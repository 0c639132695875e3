"""Tensors side by side in memory that is there only while it is used."""

from __future__ import annotations

import torch

from megatron.engine.buckets.flat_bucket import FlatBucket


def test_a_bucket_holds_memory_only_while_it_is_open() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.full((2,), 8.0)]
    bucket = FlatBucket(tensors, torch.bfloat16)
    held = bucket.flat.untyped_storage()
    for _ in range(2):
        assert held.nbytes() == 0 and not bucket.is_open
        assert bucket.fill(tensors).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 8.0]
        assert held.nbytes() == 2 * 9 and bucket.flat.dtype is torch.bfloat16
        assert [view.shape for view in bucket.views] == [each.shape for each in tensors]
        bucket.flat += 1
        assert torch.equal(bucket.views[0].float(), tensors[0] + 1)
        bucket.close()
        bucket.close()


def test_an_open_bucket_keeps_its_values() -> None:
    bucket = FlatBucket([torch.zeros(2)])
    bucket.open().fill_(3.0)
    assert bucket.open().tolist() == [3.0, 3.0] and bucket.views[0].dtype is torch.float32
