"""Which implementation of each operation a run uses, and upstream's switches of single fusions."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection

# The operations that have several implementations; `megatron.kernels.choice.Kernels` has a field for each.
OPERATIONS = (
    *("softmax", "norm", "activation", "dropout_add", "rotary", "cross_entropy"),
    *("optimizer", "embedding", "initial_values"),
)
AUTO, CSRC, APEX, TORCH = "auto", "csrc", "apex", "torch"
IMPLEMENTATIONS = (AUTO, CSRC, APEX, TORCH)
OF_APEX = ("norm", "optimizer")  # the operations that apex has

# The operation that a switch of upstream's turns back to torch, by its field.
_SWITCHES: Mapping[str, str] = types.MappingProxyType(
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
        f"implementation of the operations: {', '.join(IMPLEMENTATIONS)} (auto: the fastest one "
        "measured, of those available), or of single ones, such as norm=csrc,softmax=torch; the operations are "
        f"{', '.join(OPERATIONS)}",
    )
    bias_dropout_fusion: bool = flag(
        True, "bias, dropout and residual in one operation; off: --kernels dropout_add=torch"
    )
    masked_softmax_fusion: bool = flag(True, "scale, mask and softmax in one operation; off: --kernels softmax=torch")
    bias_swiglu_fusion: bool = flag(True, "bias and gated activation in one operation; off: --kernels activation=torch")
    rope_fusion: bool = flag(True, "rotation of queries and keys in one operation; off: --kernels rotary=torch")
    persist_layer_norm: bool = flag(True, "compiled norms; off: --kernels norm=torch")

    @property
    def requested(self) -> Mapping[str, str]:
        """The implementation asked for, or `auto`, by operation."""
        wanted = dict.fromkeys(OPERATIONS, AUTO)
        for operation, implementation in self._parts():
            for name in (operation,) if operation else OPERATIONS:
                wanted[name] = implementation if operation or implementation != APEX or name in OF_APEX else AUTO
        return wanted | {operation: TORCH for field, operation in _SWITCHES.items() if not getattr(self, field)}

    def problems(self) -> Iterator[str]:
        named: dict[str, str] = {}
        for operation, implementation in self._parts():
            if implementation not in IMPLEMENTATIONS:
                yield (
                    f"--kernels {self.kernels}: {implementation!r} is not an implementation. Use one of "
                    f"{', '.join(IMPLEMENTATIONS)}, or OPERATION=IMPLEMENTATION."
                )
            if operation and operation not in OPERATIONS:
                yield f"--kernels {self.kernels}: there is no operation {operation!r}. Use {', '.join(OPERATIONS)}."
            if operation in named:
                yield f"--kernels {self.kernels} names {operation or 'all operations'} twice. Name each once."
            if operation and implementation == APEX and operation not in OF_APEX:
                yield f"--kernels {self.kernels}: apex is used for {' and '.join(OF_APEX)} only. Use {operation}=csrc."
            named.setdefault(operation, implementation)
        for field, operation in _SWITCHES.items():
            if not getattr(self, field) and named.get(operation, TORCH) != TORCH:
                option = f"--no-{field.replace('_', '-')}"
                yield f"{option} contradicts --kernels {self.kernels}. Remove one of the two."

    def _parts(self) -> list[tuple[str, str]]:
        """Operation, empty for all, and implementation; all first, so that what single operations ask for wins."""
        parts = (part.strip().rpartition("=") for part in self.kernels.split(","))
        return sorted(((name, implementation) for name, _, implementation in parts), key=lambda part: part[0] != "")
