"""The training dtype and its loss scale, and switches of fused kernels."""

from __future__ import annotations

import pytest

from megatron.config import KernelConfig, PrecisionConfig
from megatron.config.flags.fields import flags_of
from megatron.errors import ConfigError
from tests.config.command_lines import small


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


def test_every_switch_explains_why_it_has_no_effect() -> None:
    assert all(flag.facts.ignored and flag.default is True for flag in flags_of(KernelConfig))


def test_switching_a_fusion_off_gives_a_notice() -> None:
    (notice,) = small("--no-bias-dropout-fusion").notices
    assert notice == "--no-bias-dropout-fusion is accepted and ignored: PyTorch picks the kernel for this operation."
