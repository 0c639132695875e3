"""Switches of fused kernels."""

from __future__ import annotations

from megatron.config import KernelConfig
from megatron.config.flags.fields import flags_of
from tests.config.command_lines import small


def test_every_switch_explains_why_it_has_no_effect() -> None:
    assert all(flag.facts.ignored and flag.default is True for flag in flags_of(KernelConfig)[1:])
    assert flags_of(KernelConfig)[0].field == "fused_attention"  # the one that has an effect


def test_switching_a_fusion_off_gives_a_notice() -> None:
    (notice,) = small("--no-bias-dropout-fusion").notices
    assert notice == "--no-bias-dropout-fusion is accepted and ignored: PyTorch picks the kernel for this operation."
