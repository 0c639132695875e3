"""The training dtype and its loss scale."""

from __future__ import annotations

from megatron.config import PrecisionConfig


def test_the_blocks_in_eight_bits() -> None:
    assert not PrecisionConfig(bf16=True).float8_blocks(4)
    assert PrecisionConfig(bf16=True).shown_name == "bfloat16"
    hybrid = PrecisionConfig(bf16=True, fp8_hybrid=True)
    assert hybrid.fp8_format == "hybrid" and hybrid.float8_blocks(4) == range(4)
    assert hybrid.shown_name == "bfloat16 with fp8 products (hybrid, tensorwise)"
    ends = PrecisionConfig(bf16=True, fp8_e4m3=True, first_last_layers_bf16=True, num_layers_at_end_in_bf16=2)
    assert ends.fp8_format == "e4m3" and ends.float8_blocks(6) == range(1, 4)
