r"""Writes a checkpoint of any layout in DeepSpeed's or Megatron-LM's format.

    python tools/convert/export_megatron.py --load checkpoints/gpt2 --output universal --format universal
    python tools/convert/export_megatron.py --load checkpoints/llama --output megatron --format torch \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

universal is DeepSpeed's layout-independent format: weights and moments, one folder per parameter. torch is
Megatron-LM's iter_0000100/mp_rank_XX/model_optim_rng.pt. --naming selects the parameter names: those of the bigscience
or deepspeedai fork's pipelines, of Megatron-LM before Megatron Core (classic), or of Megatron Core (core). A network
that the format cannot represent is refused with the fields that would be lost.
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

    load: str = flag(help="folder of checkpoints (the newest is used), or one checkpoint", path=PathUse.FOLDER)
    output: str = flag(help="output folder; it must not exist", path=PathUse.FOLDER)
    format: str = flag(
        "universal", "DeepSpeed's universal format, or Megatron-LM's torch layout", choices=tuple(_NAMINGS)
    )
    naming: str | None = flag(
        None,
        "parameter names; bigscience for universal and core for torch if unset",
        choices=("bigscience", "deepspeedai", "classic", "core"),
    )
    tensor_model_parallel_size: int = flag(1, "tensor-parallel size of the output", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "pipeline-parallel size of the output", at_least=1)
    keep_padding: bool = flag(
        False,
        "universal: write the padded vocabulary rows, which DeepSpeed's ZeRO-3 loader does not add",
    )
    weights_only: bool = flag(False, "do not export the optimizer state")

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.keep_padding and self.format == "torch":
            yield "--keep-padding cannot be combined with --format torch, which always has the padding. Drop it."
        allowed = _NAMINGS.get(self.format, ())
        if self.naming is not None and allowed and self.naming not in allowed:
            yield f"--naming {self.naming} cannot be combined with --format {self.format}. Use {' or '.join(allowed)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Exports the newest checkpoint."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ExportFlags, arguments, prog="export_megatron.py", description=__doc__ or "")

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
    output = write_universal(request) if flags.format == "universal" else write_torch_layout(request)
    log.line(f"exported {checkpoint.folder} to {output}")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
