"""Knowledge distillation: training on the outputs of a teacher as well as on the labels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class DistillationConfig(ConfigSection):
    """The teacher and the weight of its outputs.

    The checkpoint of the teacher holds its architecture; flags that describe it are checked against that.

    Source of the flags: deepspeedai Megatron-DeepSpeed `megatron/arguments.py`, `_add_distillation_args`.
    There the end of distillation has no flag: the run is restarted without --mos.
    """

    kd: bool = flag(False, "knowledge distillation: train on the outputs of a teacher as well (--load-teacher)")
    mos: bool = flag(False, "same as --kd (mixture of students); usually with --kd-iters")
    load_teacher: str | None = flag(
        None,
        "checkpoint of the teacher, or a folder of checkpoints, whose newest valid one is loaded",
        path=PathUse.FOLDER,
    )
    kd_alpha_ce: float = flag(1.0, "weight of the loss on the labels (always 1 upstream)", at_least=0)
    kd_beta_ce: float = flag(1.0, "weight of the KL divergence from the teacher", at_least=0)
    kd_temp: float = flag(1.0, "temperature of both distributions in the KL divergence", above=0)
    kd_iters: int | None = flag(
        None,
        "iterations of distillation at the start of the run, followed by training on the labels alone; all if unset",
        at_least=1,
    )
    num_layers_teacher: int | None = flag(
        None, "number of layers of the teacher, checked against its checkpoint", at_least=1
    )
    hidden_size_teacher: int | None = flag(
        None, "hidden size of the teacher, checked against its checkpoint", at_least=1
    )
    num_attention_heads_teacher: int | None = flag(
        None, "attention heads of the teacher, checked against its checkpoint", at_least=1
    )
    num_experts_teacher: int | None = flag(
        None,
        "experts per MoE layer of the teacher, checked against its checkpoint; several values give one for each MoE "
        "layer",
        at_least=1,
        by_layer="moe_expert_counts_teacher",
    )
    moe_expert_counts_teacher: tuple[int, ...] = flag(
        (),
        "experts of each MoE layer of the teacher, if they differ, checked against its checkpoint",
        at_least=1,
    )

    @property
    def is_on(self) -> bool:
        return self.kd or self.mos

    @property
    def teacher_shape(self) -> dict[str, int | tuple[int, ...]]:
        """The flags that describe the teacher's architecture, as far as they were given, by field."""
        given = {
            "num_layers": self.num_layers_teacher,
            "hidden_size": self.hidden_size_teacher,
            "num_attention_heads": self.num_attention_heads_teacher,
            "num_experts": self.num_experts_teacher,
            "moe_expert_counts": self.moe_expert_counts_teacher if len({*self.moe_expert_counts_teacher}) > 1 else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def is_over(self, step: int) -> bool:
        """Returns True if a run that has taken this many steps continues without the teacher."""
        return not self.is_on or (self.kd_iters is not None and step >= self.kd_iters)
