"""What happens at document boundaries."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import DocumentConfig
from megatron.config.flags.fields import RUN_MUST_MATCH, resume_rule


@pytest.mark.parametrize(
    ("flags", "needed"),
    [({}, False), ({"eod_mask_loss": True}, False), ({"reset_position_ids": True}, True)]
    + [({"reset_attention_mask": True}, True)],
)
def test_when_the_network_needs_segments(flags: dict[str, bool], needed: bool) -> None:
    assert DocumentConfig(**flags).needs_segments is needed


def test_a_resume_keeps_all_document_settings() -> None:
    assert {resume_rule(field) for field in dataclasses.fields(DocumentConfig)} == {RUN_MUST_MATCH}
