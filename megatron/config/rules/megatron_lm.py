"""A notice for commands of Megatron-LM whose defaults give other results there."""

from collections.abc import Iterator
from typing import Any

from megatron.config.flags.fields import as_written
from megatron.config.rules.rule import notice
from megatron.config.run_sections import ReadFlags
from megatron.config.sections.optimizers import LION, MUON

# Flags of Megatron-LM that others' commands do not set; most of its commands have one of them.
ONLY_THERE = (
    "use_mcore_models", "attention_backend", "ckpt_format", "overlap_grad_reduce", "overlap_param_gather",
    "cross_entropy_loss_fusion", "log_throughput", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_router_dtype",
)  # fmt: skip
# Megatron-LM's defaults, in the order of their messages; docs/coming_from/megatron_lm.md explains all differences.
DEFAULTS_THERE: tuple[tuple[str, Any], ...] = (
    ("model.moe_aux_loss_coeff", 0.0), ("precision.fp8_recipe", "delayed"), ("optim.muon_momentum", 0.9),
    ("optim.muon_nesterov", False), ("optim.muon_extra_scale_factor", 1.0), ("optim.lion_beta1", 0.95),
    ("optim.lion_beta2", 0.98),
)  # fmt: skip


@notice
def _other_defaults(run: ReadFlags) -> Iterator[str]:
    """Lists the defaults in use that differ from Megatron-LM's."""
    given = {destination.partition(".")[2] for destination, value in run.values.items() if value is not False}
    sign = next((name for name in ONLY_THERE if name in given), None)
    optimizer, uses_fp8 = run.optim.optimizer, run.precision.fp8_format is not None
    is_used = {"moe": run.model.num_experts > 1, "fp8": uses_fp8, optimizer: optimizer in (MUON, LION)}
    differing = []
    for destination, there in DEFAULTS_THERE:
        section, _, name = destination.partition(".")
        here, option = getattr(getattr(run, section), name), f"--{name.replace('_', '-')}"
        if is_used.get(name.partition("_")[0]) and destination not in run.values and here != there:
            differing.append(f"{as_written(option, here)} ({as_written(option, there)} there)")
    if sign and differing:
        yield (
            f"--{sign.replace('_', '-')} is a flag of Megatron-LM, whose defaults differ from this run's: "
            f"{', '.join(differing)}. Set the flags to choose."
        )
