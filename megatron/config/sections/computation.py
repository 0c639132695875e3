"""How steps are computed: number formats, what is recomputed, and which implementation each operation has."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection

E4M3, HYBRID = "e4m3", "hybrid"  # values of --fp8-format
TENSORWISE, ROWWISE = "tensorwise", "rowwise"  # values of --fp8-recipe
_ABSENT_RECIPES = ("delayed", "mxfp8", "blockwise", "custom")  # Megatron-LM's others


@dataclass(frozen=True)
class PrecisionConfig(ConfigSection):
    """The training dtype, the loss scale, and which matrix products are computed in eight bits."""

    fp16: bool = flag(False, "train in float16 with loss scaling; CUDA only")
    bf16: bool = flag(False, "train in bfloat16")
    loss_scale: float | None = flag(None, "constant fp16 loss scale; dynamic if unset", above=0)
    initial_loss_scale: float = flag(2.0**32, "initial value of the dynamic loss scale", at_least=1)
    min_loss_scale: float = flag(1.0, "lower bound of the dynamic loss scale", above=0)
    loss_scale_window: float = flag(1000, "steps without overflow before the loss scale doubles", at_least=1)
    hysteresis: int = flag(2, "overflows before the loss scale halves", at_least=1)
    fp8_format: str | None = flag(
        None,
        "compute the matrix products of transformer blocks in 8 bits, with --bf16 around them: e4m3, or hybrid, with "
        "gradients in e5m2. It has not been run on a GPU yet",
        choices=(E4M3, HYBRID),
    )
    fp8_e4m3: bool = flag(False, f"the same as --fp8-format {E4M3}")
    fp8_hybrid: bool = flag(False, f"the same as --fp8-format {HYBRID}")
    fp8_recipe: str = flag(
        TENSORWISE, f"what has a scale of its own: {TENSORWISE}, a whole matrix; {ROWWISE}, each of its rows"
    )
    fp8_wgrad: bool = flag(True, "compute gradients of weights in 8 bits too")
    fp8_emulation: bool = flag(
        False, "round as --fp8-format says and multiply in float32: slow, on any device, to compare losses"
    )
    first_last_layers_bf16: bool = flag(False, "leave the first and the last blocks in bf16")
    num_layers_at_start_in_bf16: int = flag(1, "with --first-last-layers-bf16, how many first blocks", at_least=0)
    num_layers_at_end_in_bf16: int = flag(1, "with --first-last-layers-bf16, how many last blocks", at_least=0)

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and activations: float32, float16 or bfloat16."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    @property
    def shown_name(self) -> str:
        """The dtype, and what is in eight bits."""
        if self.fp8_format is None:
            return self.dtype_name
        emulated = ", emulated" if self.fp8_emulation else ""
        return f"{self.dtype_name} with fp8 products ({self.fp8_format}, {self.fp8_recipe}{emulated})"

    def float8_blocks(self, num_layers: int) -> range:
        """The transformer blocks whose products are computed in eight bits."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)

    def complete(self) -> None:
        if self.fp8_format is None and self.fp8_e4m3 != self.fp8_hybrid:
            self.set_derived("fp8_format", E4M3 if self.fp8_e4m3 else HYBRID)

    def problems(self) -> Iterator[str]:
        if self.fp8_recipe in _ABSENT_RECIPES:
            yield (
                f"--fp8-recipe {self.fp8_recipe} is not supported: scales come from the values at hand, and are "
                f"float32. Use --fp8-recipe {TENSORWISE}, or {ROWWISE} for a scale per row."
            )
        elif self.fp8_recipe not in (TENSORWISE, ROWWISE):
            yield f"--fp8-recipe {self.fp8_recipe} is unknown. Use {TENSORWISE} or {ROWWISE}."


@dataclass(frozen=True)
class RecomputeConfig(ConfigSection):
    """Activation checkpointing: whole blocks, attention only, or nothing."""

    checkpoint_activations: bool = flag(
        False, "recompute each block in the backward pass instead of keeping its activations"
    )
    checkpoint_num_layers: int = flag(
        1,
        "blocks per recompute chunk",
        spelled=("--recompute-num-layers", "--activations-checkpoint-num-layers"),
        at_least=1,
    )
    distribute_saved_activations: bool = flag(
        False,
        "with --checkpoint-activations, split the input that is kept of each block over the tensor-parallel ranks, as "
        "--sequence-parallel does anyway",
        spelled=("--distribute-checkpointed-activations", "--partition-activations"),
    )
    recompute_granularity: str | None = flag(
        None, "full: the same as --checkpoint-activations; selective: attention only", choices=("full", "selective")
    )
    recompute_activations: bool = flag(False, "the same as --recompute-granularity selective")
    activations_checkpoint_method: str | None = flag(
        None, "uniform: the same as --checkpoint-activations", choices=("uniform",)
    )

    @property
    def distributes_saved(self) -> bool:
        """Whether what is kept of a block that is recomputed is split over the tensor-parallel ranks."""
        return self.checkpoint_activations and self.distribute_saved_activations

    @property
    def recomputes_attention(self) -> bool:
        """Whether the attention core alone is recomputed."""
        return self.recompute_granularity == "selective"

    def complete(self) -> None:
        if self.recompute_activations and self.recompute_granularity is None:
            self.set_derived("recompute_granularity", "selective")
        if self.recompute_granularity == "full" or self.activations_checkpoint_method is not None:
            self.set_derived("checkpoint_activations", True)


# The operations that have several implementations; `megatron.kernels.choice.Kernels` has a field for each.
OPERATIONS = (
    *("softmax", "norm", "activation", "dropout_add", "rotary", "cross_entropy"),
    *("optimizer", "embedding", "initial_values"),
)
AUTO, CSRC, TORCH = "auto", "csrc", "torch"
IMPLEMENTATIONS = (AUTO, CSRC, TORCH)
BLOCK_OPERATIONS = ("softmax", "norm", "activation", "dropout_add", "rotary")  # those inside of transformer blocks
INDUCTOR = "inductor"

# The operation that a switch of upstream's turns back to torch, by its field.
SWITCHES: Mapping[str, str] = types.MappingProxyType(
    {
        "bias_dropout_fusion": "dropout_add",
        "masked_softmax_fusion": "softmax",
        "bias_swiglu_fusion": "activation",
        "rope_fusion": "rotary",
        "persist_layer_norm": "norm",
    }
)


@dataclass(frozen=True)
class KernelConfig(ConfigSection):
    """The implementations of operations; see docs/kernels.md."""

    fused_attention: bool = flag(
        True,
        "attention without an s x s matrix of probabilities in memory; without documents or windows, turning it off "
        "keeps that matrix, for comparison",
    )
    kernels: str = flag(
        AUTO,
        f"implementation of the operations: {', '.join(IMPLEMENTATIONS)} (auto: the fastest one measured, of those "
        f"available), or of single ones, such as norm=csrc,softmax=torch; the operations are {', '.join(OPERATIONS)}",
    )
    bias_dropout_fusion: bool = flag(
        True, "bias, dropout and residual in one operation; off: --kernels dropout_add=torch"
    )
    masked_softmax_fusion: bool = flag(True, "scale, mask and softmax in one operation; off: --kernels softmax=torch")
    bias_swiglu_fusion: bool = flag(True, "bias and gated activation in one operation; off: --kernels activation=torch")
    rope_fusion: bool = flag(True, "rotation of queries and keys in one operation; off: --kernels rotary=torch")
    persist_layer_norm: bool = flag(True, "compiled norms; off: --kernels norm=torch")
    gradient_accumulation_fusion: bool = flag(
        True,
        "the product that computes the gradient of a large weight adds it to the sum over micro-batches, in float32, "
        "where the device has such a product and nothing stands in the way; the first lines of the run say what does",
    )
    compile: bool = flag(
        False,
        "compile each transformer block as a whole with torch.compile, at its first step; operations inside blocks are "
        "then torch's, which it fuses, unless --kernels names others. It has not been run on a GPU yet",
    )
    compile_backend: str = flag(
        INDUCTOR,
        "what --compile makes of a block: a program (inductor), or the same operations one by one (aot_eager), which "
        "needs no compiler and shows whose fault a difference is",
        choices=(INDUCTOR, "aot_eager"),
    )

    cuda_graphs: str = flag(
        "off",
        "auto: forward, loss and backward of a micro-batch as one CUDA graph, which the host starts in one call, where "
        "nothing stands in the way; the first lines of the run say what does. A capture that fails leaves the run "
        "without",
        choices=("auto", "off"),
    )
    manual_gc_interval: int = flag(
        100,
        "steps after which Python's garbage is collected, on all ranks at once, as it is after an evaluation; never "
        "in between. 0: whenever Python decides",
        at_least=0,
    )

    @property
    def requested(self) -> Mapping[str, str]:
        """The implementation asked for, or `auto`, by operation."""
        wanted = dict.fromkeys(OPERATIONS, AUTO)
        if self.compile:
            wanted |= dict.fromkeys(BLOCK_OPERATIONS, TORCH)
        for operation, implementation in self.parts:
            for name in (operation,) if operation else OPERATIONS:
                if operation or implementation in (CSRC, TORCH):
                    wanted[name] = implementation
        return wanted | {operation: TORCH for field, operation in SWITCHES.items() if not getattr(self, field)}

    def problems(self) -> Iterator[str]:
        named: set[str] = set()
        for operation, implementation in self.parts:
            if implementation not in IMPLEMENTATIONS:
                yield (
                    f"--kernels {self.kernels}: {implementation!r} is not an implementation. Use one of "
                    f"{', '.join(IMPLEMENTATIONS)}, or OPERATION=IMPLEMENTATION."
                )
            if operation and operation not in OPERATIONS:
                yield f"--kernels {self.kernels}: there is no operation {operation!r}. Use {', '.join(OPERATIONS)}."
            if operation in named:
                yield f"--kernels {self.kernels} names {operation or 'all operations'} twice. Name each once."
            named.add(operation)

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Operation, empty for all, and implementation; all first, so that what single operations ask for wins."""
        parts = (part.strip().rpartition("=") for part in self.kernels.split(","))
        return sorted(((name, implementation) for name, _, implementation in parts), key=lambda part: part[0] != "")
