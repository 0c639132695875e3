"""Which optimizer updates the weights, and its constants."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, SMALLEST_FLOAT32, flag
from megatron.config.flags.section import ConfigSection

OPTIMIZERS = (ADAM, MUON, LION, SGD, SCHEDULE_FREE) = ("adam", "muon", "lion", "sgd", "schedule-free")
# Those whose state holds a mean of the iterates: the weights that are evaluated.
AVERAGING = (SCHEDULE_FREE,)


@dataclass(frozen=True)
class OptimizerFields(ConfigSection):
    """The optimizers; each ignores what is another one's."""

    optimizer: str = flag(
        ADAM,
        "optimizer family: adam is AdamW; muon orthogonalises the matrices of blocks and leaves the rest to AdamW; "
        "schedule-free is AdamW with a mean of its iterates in place of a decay",
        choices=OPTIMIZERS,
        synonyms={"adamw": ADAM, "fusedadamw": ADAM, "dist_muon": MUON, "schedule_free": SCHEDULE_FREE},
        resume=RUN_MUST_MATCH,
    )
    use_bnb_optimizer: bool = flag(
        False, "AdamW of bitsandbytes: 8-bit moments, 32-bit ones for embeddings and small tensors"
    )
    ema_decay: float | None = flag(
        None,
        "keep a mean of the weights, of which an update leaves this share: it is evaluated, saved and can be exported",
        above=0,
        below=1,
    )
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "Adam's epsilon", at_least=SMALLEST_FLOAT32)
    schedule_free_weight_lr_power: float = flag(
        2.0, "an iterate counts in the mean of schedule-free as its learning rate to this power", at_least=0
    )
    sgd_momentum: float = flag(0.9, "momentum of SGD", at_least=0, below=1)
    lion_beta1: float = flag(0.9, "share of the momentum in an update of Lion", at_least=0, below=1)
    lion_beta2: float = flag(0.99, "decay of Lion's momentum", at_least=0, below=1)
    muon_momentum: float = flag(0.95, "momentum of Muon", at_least=0, below=1)
    muon_nesterov: bool = flag(
        True,
        "Nesterov momentum in Muon",
        spelled=("--muon-use-nesterov", "--muon-no-nesterov", "--muon-no-use-nesterov"),
    )
    muon_coefficient_type: str = flag(
        "quintic",
        "polynomials of Muon's Newton-Schulz iteration: simple (Jordan 2024), quintic (modded-nanogpt) or "
        "polar_express (Amsel et al. 2025)",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations of Muon", at_least=1, at_most=99)
    muon_scale_mode: str = flag(
        "spectral",
        "what Muon multiplies an [out, in] update by: spectral is sqrt(max(out, in)) (Liu et al. 2025), shape_scaling "
        "sqrt(max(1, out/in)) (Jordan 2024), unit_rms_norm sqrt(out/in) (Pethick et al. 2025)",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
    )
    muon_extra_scale_factor: float = flag(
        0.2, "and by this; with spectral, 0.2 lets AdamW's learning rate serve both (Liu et al. 2025)", above=0
    )
    muon_dtype: str = flag(
        "float32", "dtype in which Muon's matrices are orthogonalised", choices=("float32", "bfloat16")
    )

    def state_bytes(self, *, of_blocks: bool) -> int:
        """Bytes that the optimizer keeps of an element, beside its fp32 weight: moments, and a mean of the weights.

        The 8-bit moments of --use-bnb-optimizer count as those of AdamW.

        Args:
            of_blocks: whether the element is one of a matrix of a block, of which Muon has one moment.
        """
        moments = {ADAM: 2, SCHEDULE_FREE: 2, LION: 1, MUON: 1 if of_blocks else 2, SGD: int(self.sgd_momentum > 0)}
        return 4 * (moments[self.optimizer] + (self.ema_decay is not None))
