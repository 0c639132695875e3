"""Settings of a DeepSpeed file that do not fit the resolved run are refused with the way out."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.config.refusals import sentences


@pytest.mark.parametrize(
    ("text", "content", "sentence"),
    [
        (
            "",
            {"gradient_accumulation_steps": 3},
            r'"gradient_accumulation_steps" is 3, but a global batch of 8 in micro-batches of 2 on '
            r"1 data-parallel rank\(s\) gives 4\. Remove the entry or change --global-batch-size to 6",
        ),
        (
            "",
            {"data_types": {"grad_accum_dtype": "bf16"}},
            r"is bf16, but the run trains in fp32\. It must be fp32,",
        ),
        (
            "--fp16",
            {"data_types": {"grad_accum_dtype": "bf16"}},
            r"trains in fp16\. It must be fp32 or fp16, or be omitted",
        ),
        (
            "--zero-stage 0",
            {"zero_optimization": {"cpu_offload": True}},
            r"offload_optimizer\" requires ZeRO stage 1",
        ),
        (
            "",
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            r'ratio" 0\.3 requires ZeRO stage 3',
        ),
        (
            "--zero-stage 3 --use-bnb-optimizer",
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            r"ratio\" 0\.3 cannot be combined with --use-bnb-optimizer",
        ),
        ("--zero-stage 2", {"prescale_gradients": True}, r"true requires ZeRO stage 1 or lower, not 2"),
        ("--zero-stage 3", {"gradient_predivide_factor": 2}, r"2 requires .* Use --zero-stage 1 or remove it"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(
    tmp_path: Path, text: str, content: dict[str, Any], sentence: str
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    (said,) = sentences(f"{text} --deepspeed_config {shlex.quote(str(file))} | on 1 process with a GPU")
    assert re.search(sentence, said), said
