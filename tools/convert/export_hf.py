"""Writes a checkpoint of any layout as a Hugging Face model directory.

    python tools/convert/export_hf.py --load checkpoints/llama --output Llama-mine --dtype bfloat16

The directory loads offline with AutoModelForCausalLM (an encoder with AutoModelForMaskedLM) and AutoTokenizer. The
logits of both networks are compared in float32, which proof.json records; if they differ, nothing is written. Use
--proof-layers to compare only the first layers of a model that does not fit into memory twice in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, RunConfig, flag, parse_flags
from megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megatron.tokenizers.tokenizer import TokenizerChoice

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class ExportFlags(ConfigSection):
    """Flags of this program."""

    load: str = flag(
        help="folder of checkpoints (the newest valid one is used), or one checkpoint", path=PathUse.FOLDER
    )
    output: str = flag(help="output directory; it must not exist", path=PathUse.FOLDER)
    dtype: str | None = flag(
        None, "dtype of the weights; as stored if unset", choices=("float32", "bfloat16", "float16")
    )
    max_shard_size: str = flag("5GB", "maximum size of a weight file, in KB, MB, GB or TB")
    model_type: str | None = flag(
        None, "model type to write; the imported one, or the first that supports the network, if unset"
    )
    tokenizer_name_or_path: str | None = flag(
        None,
        "path to the tokenizer, if it has moved since training",
        spelled=("--tokenizer-model",),
        path=PathUse.FILE_OR_FOLDER,
    )
    vocab_file: str | None = flag(
        None, "path to the vocabulary file, if it has moved since training", path=PathUse.SMALL_FILE
    )
    merge_file: str | None = flag(
        None, "path to the BPE merge file, if it has moved since training", path=PathUse.SMALL_FILE
    )
    chat_template: str | None = flag(
        None,
        "chat template to write, by name or file; fine-tuning's if unset",
        path=PathUse.FILE_OR_FOLDER,
    )
    averaged_weights: bool = flag(
        False,
        "export the averaged weights of a run with --ema-decay or --optimizer schedule-free",
    )
    proof_layers: int | None = flag(
        None,
        "number of first layers, with embedding and output layer, whose logits are compared; all if unset",
        at_least=1,
    )

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        try:
            self.largest_file_bytes()
        except ConfigError as failure:
            yield from failure.problems

    def largest_file_bytes(self) -> int:
        """`--max-shard-size` in bytes.

        Raises:
            ConfigError: it is not a number with a unit.
        """
        number, unit = self.max_shard_size[:-2].strip(), self.max_shard_size[-2:].upper()
        if not number.isdecimal() or int(number) < 1 or unit not in _UNITS:
            raise ConfigError(
                f"--max-shard-size {self.max_shard_size} is not a size. Expected for example 5GB or 500MB."
            )
        return int(number) * _UNITS[unit]


def main(argv: Sequence[str] | None = None) -> int:
    """Exports the newest checkpoint."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ExportFlags, arguments, prog="export_hf.py", description=__doc__ or "")

    from megatron.checkpoint import newest_record
    from megatron.checkpoint.record import Record
    from megatron.parallel.mesh import ParallelMesh
    from trident.convert.hugging_face.exporting import ExportRequest, export_model, tuned_template

    newest = newest_record(Path(flags.load), ParallelMesh.single())
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {flags.load} (--load {flags.load}). Give the folder of a run's checkpoints."
        )
    record = Record.from_json(newest.record, newest.path)
    config = RunConfig.from_json(record.config)
    choice = _tokenizer(flags, config, newest.path)
    output = export_model(
        ExportRequest(
            newest.path,
            Path(flags.output),
            config.model,
            choice,
            record.tokenizer,
            flags.dtype,
            flags.largest_file_bytes(),
            flags.model_type,
            flags.proof_layers,
            origin=record.first_family,
            kind="average" if flags.averaged_weights else "weight",
            chat_template=tuned_template(flags.chat_template or config.finetuning.chat_template, config.data, choice),
        )
    )
    log.line(f"exported {newest.path} to {output}")
    return 0


def _tokenizer(flags: ExportFlags, config: RunConfig, checkpoint: Path) -> TokenizerChoice:
    """The checkpoint's tokenizer, or the one set by flags."""
    from megatron.tokenizers.tokenizer import TokenizerChoice

    if flags.tokenizer_name_or_path is not None:
        return TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=flags.tokenizer_name_or_path)
    recorded = TokenizerChoice.of(config.data).or_copy_next_to(checkpoint)
    return replace(
        recorded,
        vocab_file=flags.vocab_file or recorded.vocab_file,
        merge_file=flags.merge_file or recorded.merge_file,
    )


if __name__ == "__main__":
    process_exit.exit_with(main)
