"""What is asked of a distillation, and when it is over."""

from __future__ import annotations

from megatron.config.objective.distillation import DistillationConfig
from tests.config.command_lines import small

# What scripts of deepspeedai's fork pass for a teacher without experts and for one with the same number in each layer.
PUBLISHED = (
    "--kd --kd-beta-ce 1 --num-layers-teacher 24 --hidden-size-teacher 1024 --num-attention-heads-teacher 16 "
    "--load-teacher teacher"
)
PUBLISHED_WITH_EXPERTS = (
    "--mos --kd-beta-ce 1 --num-layers-teacher 24 --hidden-size-teacher 1024 --num-attention-heads-teacher 16 "
    "--num-experts-teacher 64 64 64 --load-teacher teacher"
)


def test_there_is_no_teacher_by_default() -> None:
    section = DistillationConfig()
    assert not section.is_on and section.is_over(0) and section.teacher_shape == {}


def test_published_flags() -> None:
    dense, mixed = (small(text).distillation for text in (PUBLISHED, PUBLISHED_WITH_EXPERTS))
    assert dense.is_on and mixed.is_on and (dense.kd_alpha_ce, dense.kd_beta_ce, dense.kd_temp) == (1.0, 1.0, 1.0)
    assert dense.teacher_shape == {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
    assert mixed.teacher_shape["num_experts"] == 64 and "moe_expert_counts" not in mixed.teacher_shape
    pyramid = small(PUBLISHED_WITH_EXPERTS.replace("64 64 64", "64 128")).distillation
    assert (pyramid.teacher_shape["num_experts"], pyramid.teacher_shape["moe_expert_counts"]) == (128, (64, 128))


def test_it_is_over_after_its_iterations() -> None:
    section = DistillationConfig(mos=True, load_teacher="t", kd_iters=3)
    assert [section.is_over(step) for step in (0, 2, 3, 9)] == [False, False, True, True]
    assert not DistillationConfig(kd=True, load_teacher="t").is_over(10**9)
