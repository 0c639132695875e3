"""The context of a micro-batch: positions and masks of documents, and passing it to the next stage."""

from __future__ import annotations

import pytest
import torch

from megatron.model.interface.key_value_cache import BatchCaches
from megatron.model.interface.step_context import MaskKind, StepContext, StepSettings, TextPart, restarted_positions
from megatron.parallel.mesh import Axis

SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]])
IDS = torch.tensor([7, 9])


def test_positions_restart_with_every_segment() -> None:
    assert restarted_positions(SEGMENTS).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


def test_segments_matter_only_if_requested() -> None:
    plain = StepSettings().context(IDS, SEGMENTS)
    assert (plain.position_ids, plain.mask) == (None, MaskKind.CAUSAL)
    positions = StepSettings(restart_positions=True).context(IDS, SEGMENTS)
    assert positions.mask is MaskKind.CAUSAL
    assert torch.equal(positions.position_ids, restarted_positions(SEGMENTS))
    masked = StepSettings(mask=MaskKind.DOCUMENTS).context(IDS, SEGMENTS)
    assert masked.position_ids is None
    assert masked.mask is MaskKind.DOCUMENTS
    assert torch.equal(masked.segment_ids, SEGMENTS)
    assert StepSettings(mask=MaskKind.DOCUMENTS).context(IDS).mask is MaskKind.CAUSAL


def test_a_context_crosses_a_stage_boundary_as_tensors() -> None:
    for settings, segments in (
        (StepSettings(seed=3), None),
        (StepSettings(seed=3, restart_positions=True, mask=MaskKind.DOCUMENTS), SEGMENTS),
    ):
        context = settings.context(IDS, segments)
        assert len(context.tensors) == settings.tensor_count
        arrived = settings.context(*(tensor.clone() for tensor in context.tensors))
        assert (arrived.first_sample, arrived.seed, arrived.mask) == (7, 3, context.mask)
        assert torch.equal(arrived.sample_ids, context.sample_ids)
        if segments is not None:
            assert torch.equal(arrived.position_ids, context.position_ids)
            assert torch.equal(arrived.segment_ids, segments)


def test_positions_follow_the_cached_tokens() -> None:
    caches = BatchCaches(8)
    caches.append(1, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    assert StepSettings().context(IDS, caches=caches).position_offset == 3
    assert StepSettings().context(IDS, first_sample=5).first_sample == 5


def test_positions_needed_are_those_of_the_longest_text() -> None:
    assert StepContext(IDS, position_offset=3).positions_needed(4) == 7
    mixed = StepContext(IDS[:1], texts=(TextPart(2, 6, 8), TextPart(1, 3, 9)))
    assert mixed.positions_needed(3) == 8


def test_a_pipeline_needs_the_width_of_hidden_states() -> None:
    assert StepSettings(hidden_size=8).hidden_shape(2, 5) == (2, 5, 8)
    with pytest.raises(ValueError, match=r"requires StepSettings\.hidden_size"):
        StepSettings().hidden_shape(2, 5)


def test_stages_that_split_hidden_states_send_each_other_a_part_of_the_tokens() -> None:
    settings = StepSettings(hidden_size=8, sequence_parallel=Axis("tp", 1, 2, (0, 1)))
    assert settings.hidden_shape(2, 6) == (2, 3, 8)
