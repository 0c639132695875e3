"""Optimizers and their hyperparameters."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, SMALLEST_FLOAT32, flag
from megatron.config.flags.section import ConfigSection

OPTIMIZERS = (ADAM, MUON, LION, SGD, SCHEDULE_FREE) = ("adam", "muon", "lion", "sgd", "schedule-free")
# Optimizers whose state holds an average of the iterates, which is evaluated.
AVERAGING = (SCHEDULE_FREE,)
# The dtypes of --muon-fp32-matmul-prec.
MATMUL_PRECISIONS: Mapping[str, str] = types.MappingProxyType(
    {"low": "bfloat16", "medium": "bfloat16", "high": "float32", "highest": "float32"}
)


@dataclass(frozen=True)
class OptimizerFields(ConfigSection):
    """Optimizer flags; each optimizer ignores the others' flags."""

    optimizer: str = flag(
        ADAM,
        "optimizer: adam is AdamW; muon orthogonalizes updates of matrices in blocks and uses AdamW for the rest; "
        "schedule-free is AdamW with averaged iterates instead of a decay",
        choices=OPTIMIZERS,
        synonyms={"adamw": ADAM, "fusedadamw": ADAM, "dist_muon": MUON, "schedule_free": SCHEDULE_FREE},
        resume=RUN_MUST_MATCH,
    )
    use_bnb_optimizer: bool = flag(
        False, "8-bit AdamW of bitsandbytes; moments of embeddings and small tensors are 32-bit"
    )
    ema_decay: float | None = flag(
        None,
        "keep an exponential moving average of the weights with this decay; it is evaluated, saved and exportable",
        above=0,
        below=1,
    )
    adam_beta1: float = flag(0.9, "decay of Adam's first-moment estimate", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "decay of Adam's second-moment estimate", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "epsilon of Adam's denominator", at_least=SMALLEST_FLOAT32)
    schedule_free_weight_lr_power: float = flag(
        2.0, "schedule-free: weight of an iterate in the average is its learning rate to this power", at_least=0
    )
    sgd_momentum: float = flag(0.9, "momentum of SGD", at_least=0, below=1)
    lion_beta1: float = flag(0.9, "Lion: interpolation of momentum and gradient in the update", at_least=0, below=1)
    lion_beta2: float = flag(0.99, "Lion: decay of the momentum", at_least=0, below=1)
    muon_momentum: float = flag(0.95, "momentum of Muon", at_least=0, below=1)
    muon_nesterov: bool = flag(
        True,
        "Muon with Nesterov momentum",
        spelled=("--muon-use-nesterov", "--muon-no-nesterov", "--muon-no-use-nesterov"),
    )
    muon_coefficient_type: str = flag(
        "quintic",
        "coefficients of Muon's Newton-Schulz iteration: simple (Jordan 2024), quintic (modded-nanogpt) or "
        "polar_express (Amsel et al. 2025)",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_num_ns_steps: int = flag(5, "Newton-Schulz steps of Muon", at_least=1, at_most=99)
    muon_scale_mode: str = flag(
        "spectral",
        "scale of Muon's [out, in] updates: spectral is sqrt(max(out, in)) (Liu et al. 2025), shape_scaling "
        "sqrt(max(1, out/in)) (Jordan 2024), unit_rms_norm sqrt(out/in) (Pethick et al. 2025)",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
    )
    muon_extra_scale_factor: float = flag(
        0.2, "extra scale of Muon's updates; with spectral, 0.2 matches AdamW's update size (Liu et al. 2025)", above=0
    )
    muon_dtype: str | None = flag(
        None,
        "dtype of Muon's orthogonalization; by default bfloat16 on GPUs, where float32 takes ten times as long, and "
        "float32 on CPUs",
        choices=("float32", "bfloat16"),
    )
    muon_fp32_matmul_prec: str | None = flag(
        None,
        "Megatron-LM's --muon-dtype: low and medium are bfloat16, high and highest float32",
        choices=tuple(MATMUL_PRECISIONS),
    )

    def orthogonalization_dtype(self, device_type: str) -> str:
        """The dtype of Muon's orthogonalization on a type of device."""
        if self.muon_fp32_matmul_prec is not None:
            return MATMUL_PRECISIONS[self.muon_fp32_matmul_prec]
        return self.muon_dtype or ("bfloat16" if device_type == "cuda" else "float32")

    def state_bytes(self, *, of_blocks: bool) -> int:
        """Bytes of optimizer state per element, without its fp32 weight: moments, and the average of the weights.

        The 8-bit moments of --use-bnb-optimizer count as fp32.

        Args:
            of_blocks: True for an element of a matrix in a block; Muon keeps one moment for it.
        """
        moments = {ADAM: 2, SCHEDULE_FREE: 2, LION: 1, MUON: 1 if of_blocks else 2, SGD: int(self.sgd_momentum > 0)}
        return 4 * (moments[self.optimizer] + (self.ema_decay is not None))
