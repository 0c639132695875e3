"""What the run reads."""

from __future__ import annotations

import dataclasses

from megatron.config import DocumentConfig
from megatron.config.flags.fields import RUN_MUST_MATCH, resume_rule


def test_a_resume_keeps_all_document_settings() -> None:
    assert {resume_rule(field) for field in dataclasses.fields(DocumentConfig)} == {RUN_MUST_MATCH}
