r"""Writes a checkpoint of any layout in DeepSpeed's or Megatron-LM's format.

    python tools/convert/export_megatron.py --load checkpoints/gpt2 --output universal --format universal
    python tools/convert/export_megatron.py --load checkpoints/llama --output megatron --format torch \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

universal is DeepSpeed's format for every layout: weights and moments, one folder per parameter. torch is Megatron-LM's
iter_0000100/mp_rank_XX/model_optim_rng.pt. --naming chooses the parameter names: bigscience and deepspeedai are the
names in those forks' pipelines, classic the modules of Megatron-LM before Megatron Core, core today's. A network that
cannot be expressed is refused, naming the fields that would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, RunConfig, flag, parse_flags

_NAMINGS = {"universal": ("bigscience", "deepspeedai", "classic"), "torch": ("core", "classic")}


@dataclass(frozen=True)
class ExportFlags(ConfigSection):
    """Flags of this program."""

    load: str = flag(help="folder of checkpoints (the newest is taken), or one checkpoint", path=PathUse.FOLDER)
    output: str = flag(help="folder to make; it must not exist", path=PathUse.FOLDER)
    format: str = flag(
        "universal", "DeepSpeed's universal format, or Megatron-LM's torch layout", choices=tuple(_NAMINGS)
    )
    naming: str | None = flag(
        None,
        "parameter names; bigscience for universal and core for torch if unset",
        choices=("bigscience", "deepspeedai", "classic", "core"),
    )
    tensor_model_parallel_size: int = flag(1, "tensor-parallel ranks that will read it", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "pipeline stages that will read it", at_least=1)
    keep_padding: bool = flag(
        False,
        "universal: write the padding rows of the vocabulary, which DeepSpeed's ZeRO-3 loader does not add itself",
    )
    weights_only: bool = flag(False, "leave out the optimizer state")

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.keep_padding and self.format == "torch":
            yield "--keep-padding is for --format universal; the torch layout always has the padding. Drop it."
        allowed = _NAMINGS.get(self.format, ())
        if self.naming is not None and allowed and self.naming not in allowed:
            yield f"--naming {self.naming} cannot be combined with --format {self.format}. Use {' or '.join(allowed)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Exports the newest checkpoint."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ExportFlags, words, prog="export_megatron.py", description=__doc__ or "")

    from megatron.checkpoint.recovery import OpenCheckpoint
    from trident.convert.megatron_output.output_tensors import OutputRequest
    from trident.convert.megatron_output.torch_output import write_torch_layout
    from trident.convert.megatron_output.universal_output import write_universal

    checkpoint = OpenCheckpoint.newest(Path(flags.load))
    config = RunConfig.from_json(checkpoint.record.config)
    layout = replace(config.parallel, tensor_model_parallel_size=flags.tensor_model_parallel_size)
    rows = layout.padded_vocab_size(config.model.vocab_size)
    request = OutputRequest(
        checkpoint,
        Path(flags.output),
        replace(config.model, padded_vocab_size=rows),
        config.flat(),
        flags.naming or _NAMINGS[flags.format][0],
        flags.tensor_model_parallel_size,
        flags.pipeline_model_parallel_size,
        not flags.weights_only,
        flags.keep_padding,
    )
    made = write_universal(request) if flags.format == "universal" else write_torch_layout(request)
    log.line(f"exported {checkpoint.folder} to {made}")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
