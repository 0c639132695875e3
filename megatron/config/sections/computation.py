"""Computation of a step: precision, activation recomputation, and kernels."""

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
    """The training dtype, loss scaling, and FP8 matrix products."""

    fp16: bool = flag(False, "train in float16 with loss scaling; CUDA only")
    bf16: bool = flag(False, "train in bfloat16")
    loss_scale: float | None = flag(None, "static fp16 loss scale; dynamic if unset", above=0)
    initial_loss_scale: float = flag(2.0**32, "initial dynamic loss scale", at_least=1)
    min_loss_scale: float = flag(1.0, "minimum dynamic loss scale", above=0)
    loss_scale_window: float = flag(1000, "steps without overflow after which the loss scale doubles", at_least=1)
    hysteresis: int = flag(2, "overflows after which the loss scale halves", at_least=1)
    fp8_format: str | None = flag(
        None,
        "FP8 matrix products in transformer blocks, on top of --bf16: e4m3, or hybrid with gradients in e5m2; not yet "
        "run on a GPU",
        choices=(E4M3, HYBRID),
    )
    fp8_e4m3: bool = flag(False, f"same as --fp8-format {E4M3}")
    fp8_hybrid: bool = flag(False, f"same as --fp8-format {HYBRID}")
    fp8_recipe: str = flag(
        TENSORWISE, f"granularity of FP8 scaling factors: {TENSORWISE} one per matrix, {ROWWISE} one per row"
    )
    fp8_wgrad: bool = flag(True, "weight gradients in FP8")
    fp8_emulation: bool = flag(
        False, "emulate FP8: round to --fp8-format and multiply in float32, on any device; slow, for comparing losses"
    )
    first_last_layers_bf16: bool = flag(False, "keep the first and last layers in bf16")
    num_layers_at_start_in_bf16: int = flag(
        1, "number of first layers kept in bf16 by --first-last-layers-bf16", at_least=0
    )
    num_layers_at_end_in_bf16: int = flag(
        1, "number of last layers kept in bf16 by --first-last-layers-bf16", at_least=0
    )

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and activations: float32, float16 or bfloat16."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    @property
    def shown_name(self) -> str:
        """The dtype, and the FP8 format and recipe."""
        if self.fp8_format is None:
            return self.dtype_name
        emulated = ", emulated" if self.fp8_emulation else ""
        return f"{self.dtype_name} with fp8 products ({self.fp8_format}, {self.fp8_recipe}{emulated})"

    def float8_blocks(self, num_layers: int) -> range:
        """The transformer blocks with FP8 matrix products."""
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
                f"--fp8-recipe {self.fp8_recipe} is not supported: scales are computed from the current values, in "
                f"float32. Use --fp8-recipe {TENSORWISE}, or {ROWWISE} for a scale per row."
            )
        elif self.fp8_recipe not in (TENSORWISE, ROWWISE):
            yield f"--fp8-recipe {self.fp8_recipe} is unknown. Use {TENSORWISE} or {ROWWISE}."


@dataclass(frozen=True)
class RecomputeConfig(ConfigSection):
    """Activation checkpointing: full, attention only, or none."""

    checkpoint_activations: bool = flag(
        False, "activation checkpointing: recompute each layer in the backward pass instead of storing its activations"
    )
    checkpoint_num_layers: int = flag(
        1,
        "layers per recomputed chunk",
        spelled=("--recompute-num-layers", "--activations-checkpoint-num-layers"),
        at_least=1,
    )
    distribute_saved_activations: bool = flag(
        False,
        "with --checkpoint-activations, distribute the stored layer inputs over the tensor-parallel ranks, as "
        "--sequence-parallel does anyway",
        spelled=("--distribute-checkpointed-activations", "--partition-activations"),
    )
    recompute_granularity: str | None = flag(
        None,
        "full: same as --checkpoint-activations; selective: recompute core attention only",
        choices=("full", "selective"),
    )
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")
    activations_checkpoint_method: str | None = flag(
        None, "uniform: same as --checkpoint-activations", choices=("uniform",)
    )

    @property
    def distributes_saved(self) -> bool:
        """True if stored inputs of recomputed layers are distributed over the tensor-parallel ranks."""
        return self.checkpoint_activations and self.distribute_saved_activations

    @property
    def recomputes_attention(self) -> bool:
        """True if only core attention is recomputed."""
        return self.recompute_granularity == "selective"

    def complete(self) -> None:
        if self.recompute_activations and self.recompute_granularity is None:
            self.set_derived("recompute_granularity", "selective")
        if self.recompute_granularity == "full" or self.activations_checkpoint_method is not None:
            self.set_derived("checkpoint_activations", True)


# Operations with several implementations; `megatron.kernels.choice.Kernels` has a field for each.
OPERATIONS = (
    *("softmax", "norm", "activation", "dropout_add", "rotary", "cross_entropy"),
    *("optimizer", "embedding", "initial_values"),
)
AUTO, CSRC, TORCH = "auto", "csrc", "torch"
IMPLEMENTATIONS = (AUTO, CSRC, TORCH)
BLOCK_OPERATIONS = ("softmax", "norm", "activation", "dropout_add", "rotary")
INDUCTOR = "inductor"

# The operation that each of upstream's --no-... flags sets to torch, by field.
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

    fused_attention: bool = flag(True, "fused attention, which does not store the s x s matrix of probabilities")
    kernels: str = flag(
        AUTO,
        f"kernel implementation: {', '.join(IMPLEMENTATIONS)} (auto: the fastest available one, as measured), for all "
        f"operations or for some, as in norm=csrc,softmax=torch; the operations are {', '.join(OPERATIONS)}",
    )
    bias_dropout_fusion: bool = flag(
        True, "fused bias, dropout and residual addition; same as --kernels dropout_add=torch"
    )
    masked_softmax_fusion: bool = flag(True, "fused scale, mask and softmax; same as --kernels softmax=torch")
    bias_swiglu_fusion: bool = flag(True, "fused bias and gated activation; same as --kernels activation=torch")
    rope_fusion: bool = flag(True, "fused RoPE; same as --kernels rotary=torch")
    persist_layer_norm: bool = flag(True, "compiled norm kernels; same as --kernels norm=torch")
    gradient_accumulation_fusion: bool = flag(
        True,
        "accumulation of large weight gradients in float32 inside their GEMM, where the device supports it; the log's "
        "first lines name the reason if it is not used",
    )
    compile: bool = flag(
        False,
        "compile each transformer block with torch.compile at the first step; operations inside blocks then default to "
        "torch's, which it fuses; not yet run on a GPU",
    )
    compile_backend: str = flag(
        INDUCTOR,
        "torch.compile backend: inductor, or aot_eager, which generates no code and helps to locate a difference",
        choices=(INDUCTOR, "aot_eager"),
    )

    cuda_graphs: str = flag(
        "off",
        "auto: capture forward, loss and backward of a micro-batch as one CUDA graph, where possible; the log's first "
        "lines name the reason if it is not. A failed capture falls back to eager execution",
        choices=("auto", "off"),
    )
    manual_gc_interval: int = flag(
        100,
        "steps between garbage collections, synchronized over all ranks; also after each evaluation. 0 leaves garbage "
        "collection to Python",
        at_least=0,
    )

    @property
    def requested(self) -> Mapping[str, str]:
        """The requested implementation, or `auto`, by operation."""
        requested = dict.fromkeys(OPERATIONS, AUTO)
        if self.compile:
            requested |= dict.fromkeys(BLOCK_OPERATIONS, TORCH)
        for operation, implementation in self.parts:
            for name in (operation,) if operation else OPERATIONS:
                if operation or implementation in (CSRC, TORCH):
                    requested[name] = implementation
        return requested | {operation: TORCH for field, operation in SWITCHES.items() if not getattr(self, field)}

    def problems(self) -> Iterator[str]:
        named: set[str] = set()
        for operation, implementation in self.parts:
            if implementation not in IMPLEMENTATIONS:
                yield (
                    f"--kernels {self.kernels}: unknown implementation {implementation!r}. Use one of "
                    f"{', '.join(IMPLEMENTATIONS)}, or OPERATION=IMPLEMENTATION."
                )
            if operation and operation not in OPERATIONS:
                yield f"--kernels {self.kernels}: unknown operation {operation!r}. Use one of {', '.join(OPERATIONS)}."
            if operation in named:
                yield f"--kernels {self.kernels} names {operation or 'all operations'} twice. Name each once."
            named.add(operation)

    @property
    def parts(self) -> list[tuple[str, str]]:
        """(operation, implementation) pairs; the entry for all operations, with an empty name, comes first."""
        parts = (part.strip().rpartition("=") for part in self.kernels.split(","))
        return sorted(((name, implementation) for name, _, implementation in parts), key=lambda part: part[0] != "")
