"""What is asked of a distillation, and when it is over."""

from __future__ import annotations

from megatron.config.objective.distillation import DistillationConfig


def test_it_is_over_after_its_iterations() -> None:
    section = DistillationConfig(mos=True, load_teacher="t", kd_iters=3)
    assert [section.is_over(step) for step in (0, 2, 3, 9)] == [False, False, True, True]
    assert not DistillationConfig(kd=True, load_teacher="t").is_over(10**9)
