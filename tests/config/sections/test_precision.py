"""The training dtype and its loss scale."""

from __future__ import annotations

import pytest

from megatron.config import PrecisionConfig
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "name"), [({}, "float32"), ({"fp16": True}, "float16"), ({"bf16": True}, "bfloat16")]
)
def test_the_dtype(flags: dict[str, bool], name: str) -> None:
    assert PrecisionConfig(**flags).dtype_name == name


def test_a_run_has_one_dtype() -> None:
    with pytest.raises(ConfigError, match="--fp16 and --bf16 are both given"):
        PrecisionConfig(fp16=True, bf16=True)


@pytest.mark.parametrize(
    ("field", "value"), [("loss_scale", 0.0), ("initial_loss_scale", 0.5), ("min_loss_scale", 0.0), ("hysteresis", 0)]
)
def test_bounds_of_the_loss_scale(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} {value} is out of range"):
        PrecisionConfig(**{field: value})
