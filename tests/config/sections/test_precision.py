"""The training dtype and its loss scale."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import PrecisionConfig
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "name"), [({}, "float32"), ({"fp16": True}, "float16"), ({"bf16": True}, "bfloat16")]
)
def test_the_dtype(flags: dict[str, bool], name: str) -> None:
    assert PrecisionConfig(**flags).dtype_name == name


@pytest.mark.parametrize(
    ("field", "value"), [("loss_scale", 0.0), ("initial_loss_scale", 0.5), ("min_loss_scale", 0.0), ("hysteresis", 0)]
)
def test_bounds_of_the_loss_scale(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} {value} is out of range"):
        PrecisionConfig(**{field: value})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"fp8_format": "e5m2", "bf16": True}, "--fp8-format e5m2 is unknown. Use one of: e4m3, hybrid"),
        (
            {"fp8_recipe": "delayed"},
            "--fp8-recipe delayed is not supported: .* Use --fp8-recipe tensorwise, or rowwise",
        ),
        ({"fp8_recipe": "blockwise"}, "--fp8-recipe blockwise is not supported"),
        ({"fp8_recipe": "mxfp8"}, "--fp8-recipe mxfp8 is not supported"),
        ({"fp8_recipe": "rows"}, "--fp8-recipe rows is unknown. Use tensorwise or rowwise"),
        ({"num_layers_at_end_in_bf16": -1}, "--num-layers-at-end-in-bf16 -1 is out of range"),
    ],
)
def test_what_eight_bits_cannot_have(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PrecisionConfig(**flags)


def test_the_blocks_in_eight_bits() -> None:
    assert not PrecisionConfig(bf16=True).float8_blocks(4)
    assert PrecisionConfig(bf16=True).shown_name == "bfloat16"
    hybrid = PrecisionConfig(bf16=True, fp8_hybrid=True)
    assert hybrid.fp8_format == "hybrid" and hybrid.float8_blocks(4) == range(4)
    assert hybrid.shown_name == "bfloat16 with fp8 products (hybrid, tensorwise)"
    ends = PrecisionConfig(bf16=True, fp8_e4m3=True, first_last_layers_bf16=True, num_layers_at_end_in_bf16=2)
    assert ends.fp8_format == "e4m3" and ends.float8_blocks(6) == range(1, 4)
