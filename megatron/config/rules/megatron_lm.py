"""A notice for commands of Megatron-LM that leave out flags whose defaults give other numbers there."""

from collections.abc import Iterator
from typing import Any

from megatron.config.flags.fields import as_written
from megatron.config.rules.rule import notice
from megatron.config.run_sections import ReadFlags
from megatron.config.sections.optimizers import LION, MUON

# Flags that neither fork of Megatron-DeepSpeed has, and most commands of Megatron-LM have one of.
ONLY_THERE = (
    "use_mcore_models", "attention_backend", "ckpt_format", "overlap_grad_reduce", "overlap_param_gather",
    "cross_entropy_loss_fusion", "log_throughput", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_router_dtype",
)  # fmt: skip
# Defaults there, in the order of their messages; docs/coming_from/megatron_lm.md has all that differ, and why.
DEFAULTS_THERE: tuple[tuple[str, Any], ...] = (
    ("model.moe_aux_loss_coeff", 0.0), ("precision.fp8_recipe", "delayed"), ("optim.muon_momentum", 0.9),
    ("optim.muon_nesterov", False), ("optim.muon_extra_scale_factor", 1.0), ("optim.lion_beta1", 0.95),
    ("optim.lion_beta2", 0.98),
)  # fmt: skip


@notice
def _other_defaults(run: ReadFlags) -> Iterator[str]:
    """Names the defaults that a command of Megatron-LM runs with here, if they differ and are in use."""
    sign = next((name for name in ONLY_THERE if f"legacy.{name}" in run.values), None)
    optimizer, uses_fp8 = run.optim.optimizer, run.precision.fp8_format is not None
    is_used = {"moe": run.model.num_experts > 1, "fp8": uses_fp8, optimizer: optimizer in (MUON, LION)}
    differing = []
    for place, there in DEFAULTS_THERE:
        section, _, name = place.partition(".")
        here, option = getattr(getattr(run, section), name), f"--{name.replace('_', '-')}"
        if is_used.get(name.partition("_")[0]) and place not in run.values and here != there:
            differing.append(f"{as_written(option, here)} ({as_written(option, there)} there)")
    if sign and differing:
        yield (
            f"--{sign.replace('_', '-')} is a flag of Megatron-LM, which has other defaults than this run: "
            f"{', '.join(differing)}. Give them to choose."
        )
