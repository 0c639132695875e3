"""Distillation: training towards the outputs of a trained network as well as towards the labels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class DistillationConfig(ConfigSection):
    """The teacher, and how much its outputs count.

    The architecture of the teacher is in its checkpoint; flags that describe it are checked against that.

    Source of the flags: deepspeedai Megatron-DeepSpeed `megatron/arguments.py`, `_add_distillation_args`. There the end
    of the distillation has no flag: the run is started again without --mos.
    """

    kd: bool = flag(False, "distill: train towards the outputs of a teacher as well (--load-teacher)")
    mos: bool = flag(False, "same as --kd (mixture of students); usually with --kd-iters")
    load_teacher: str | None = flag(
        None,
        "the teacher: a folder of checkpoints, of which the newest that verifies is taken, or one checkpoint",
        path=PathUse.FOLDER,
    )
    kd_alpha_ce: float = flag(1.0, "weight of the loss on the labels, which upstream always has at 1", at_least=0)
    kd_beta_ce: float = flag(1.0, "weight of the divergence from the teacher", at_least=0)
    kd_temp: float = flag(1.0, "temperature of both distributions in the divergence", above=0)
    kd_iters: int | None = flag(
        None,
        "distill for this many iterations from the start and on the labels alone after that; all if unset",
        at_least=1,
    )
    num_layers_teacher: int | None = flag(
        None, "transformer blocks of the teacher, to check against its checkpoint", at_least=1
    )
    hidden_size_teacher: int | None = flag(None, "width of the teacher, to check against its checkpoint", at_least=1)
    num_attention_heads_teacher: int | None = flag(
        None, "attention heads of the teacher, to check against its checkpoint", at_least=1
    )
    num_experts_teacher: int | None = flag(
        None,
        "feed-forward networks per layer of the teacher, to check against its checkpoint; several numbers give one "
        "for each layer with experts",
        at_least=1,
        by_layer="moe_expert_counts_teacher",
    )
    moe_expert_counts_teacher: tuple[int, ...] = flag(
        (),
        "experts of each layer of the teacher that has some, if they differ, to check against its checkpoint",
        at_least=1,
    )

    @property
    def is_on(self) -> bool:
        """Whether a teacher is used at all."""
        return self.kd or self.mos

    @property
    def teacher_shape(self) -> dict[str, int | tuple[int, ...]]:
        """The given flags of the teacher's architecture, by field."""
        given = {
            "num_layers": self.num_layers_teacher,
            "hidden_size": self.hidden_size_teacher,
            "num_attention_heads": self.num_attention_heads_teacher,
            "num_experts": self.num_experts_teacher,
            "moe_expert_counts": self.moe_expert_counts_teacher if len({*self.moe_expert_counts_teacher}) > 1 else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def is_over(self, step: int) -> bool:
        """Whether a run that has taken this many steps continues without the teacher."""
        return not self.is_on or (self.kd_iters is not None and step >= self.kd_iters)
