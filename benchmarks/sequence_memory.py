"""Memory that transformer blocks keep for backward, and its peak, with samples split over ranks.

    MALLOC_MMAP_THRESHOLD_=65536 torchrun --nproc-per-node 2 benchmarks/sequence_memory.py --seq-length 16384
    MALLOC_MMAP_THRESHOLD_=65536 torchrun --nproc-per-node 2 benchmarks/sequence_memory.py --form p2p \\
        --recompute none --seq-length 32768 --window 32768 --hidden-size 64 --num-attention-heads 2

Prints one JSON line per measurement, of the first rank: the bytes of activations that autograd keeps, each memory
counted once and weights not, and the growth of the process's resident memory from before the forward pass to its
peak. With the variable the memory of freed tensors goes back to the system at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, ModelConfig, ParallelRequest, flag, parse_flags
from megatron.model.gpt import block_layers
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.joining import close_mesh, count_ranks, open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.sequence.split import SequenceSplit

_SHORT = 256  # tokens of the sample of a first pass


@dataclass(frozen=True)
class MemoryFlags(ConfigSection):
    """Flags of this program."""

    form: str = flag(
        "sequence-parallel",
        "how the ranks share the sample: tensor parallelism without and with --sequence-parallel, a ring, or Ulysses",
        choices=("sequence-parallel", "p2p", "a2a"),
    )
    seq_length: int = flag(16384, "tokens of the one sample", at_least=1)
    hidden_size: int = flag(256, "channels", at_least=8)
    layers: tuple[int, ...] = flag((1, 6), "numbers of blocks", nargs="+", at_least=1)
    recompute: tuple[str, ...] = flag(
        (Recompute.NONE.value, Recompute.BLOCKS.value),
        "what is recomputed in the backward pass",
        nargs="+",
        choices=(Recompute.NONE.value, Recompute.BLOCKS.value),
    )
    num_attention_heads: int = flag(4, "attention heads", at_least=1)
    window: int = flag(512, "tokens that each token attends to, which keeps the time short", at_least=1)


class KeptMemory(torch.autograd.graph.saved_tensors_hooks):
    """Adds up the memory of the tensors that are kept for a backward pass."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._counted = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.bytes = 0
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every number of blocks, without and with recomputation."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(MemoryFlags, words, prog="sequence_memory.py", description=__doc__ or "")
    torch.set_num_threads(1)
    ranks, shares = count_ranks(ParallelRequest()), flags.form == "sequence-parallel"
    layout = {"tensor_model_parallel_size": ranks}
    if not shares:
        layout = {"context_parallel_size": ranks, "cp_comm_type": flags.form}
    plain = open_mesh(ParallelRequest(**layout))
    forms = {"tensor-parallel": False, flags.form: True} if shares else {flags.form: False}
    for layers, recompute, form in itertools.product(flags.layers, map(Recompute, flags.recompute), forms):
        mesh = dataclasses.replace(plain, splits_sequence=forms[form])
        measured(dataclasses.replace(flags, seq_length=_SHORT), mesh, layers, recompute)  # what is allocated once
        kept, peak = measured(flags, mesh, layers, recompute)
        if mesh.world.rank == 0:
            settings = {"ranks": ranks, "form": form, "layers": layers, "recompute": recompute.value}
            print_figure("sequence_memory", "kept", kept / 2**20, "MiB", **settings)
            print_figure("sequence_memory", "peak", peak / 2**20, "MiB", **settings)
    close_mesh(plain)
    return 0


def measured(flags: MemoryFlags, mesh: ParallelMesh, layers: int, recompute: Recompute) -> tuple[int, int]:
    """Bytes that a forward pass keeps, and by which the process grows until the end of the backward pass."""
    config = ModelConfig(
        num_layers=layers,
        hidden_size=flags.hidden_size,
        num_attention_heads=flags.num_attention_heads,
        max_position_embeddings=flags.seq_length,
        attention_window=flags.window if flags.window < flags.seq_length else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=128,
        padded_vocab_size=128,
    )
    stack, axis = LayerStack(block_layers(config, mesh), seed=1), mesh.sequence_parallel
    split = SequenceSplit.of(mesh, causal=True, by_document=False)
    sample = torch.zeros(1, dtype=torch.int64)
    context = StepContext(sample, recompute=recompute, sequence_parallel=axis, split=split)
    tokens = flags.seq_length // axis.size // (1 if split is None else split.size)
    hidden = torch.randn(1, tokens, flags.hidden_size, requires_grad=True)
    for parameter in stack.parameters():  # there before the measurement, as in every step but the first
        parameter.grad = torch.zeros_like(parameter)
    kept = KeptMemory([*stack.parameters(), hidden])
    before = resident_bytes("VmRSS", reset=True)
    with kept:
        output = stack(hidden, context)
    output.backward(torch.ones_like(output))
    return kept.bytes, resident_bytes("VmHWM") - before


def resident_bytes(name: str, *, reset: bool = False) -> int:
    """The resident memory of this process, now (VmRSS) or at its peak (VmHWM) since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) * 1024


if __name__ == "__main__":
    process_exit.exit_with(main)
