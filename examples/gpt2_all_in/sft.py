"""GPT2-ALL-IN's supervised fine-tuning: the last layers of a checkpoint learn chat pairs.

    python sft.py --model logs/gentle_lovelace-26112211 --dev
    python sft.py --model checkpoints/gpt2 --data chat.jsonl

The result is in logs/SFT/NAME: ckpt, tb, config.json, and hf, with a model directory that transformers loads. The same
command continues where it was interrupted. Any flag of pretrain_gpt.py may follow and wins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from examples.gpt2_all_in.flags import PROGRAM, checkpoints_of
from megatron import log, process_exit
from megatron.config import PathUse, RunConfig, flag
from megatron.config.program_flags import ProgramFlags, read_program
from megatron.errors import CheckpointError, ConfigError
from megatron.parallel.rank_start import begin_rank

_DEV_PAIRS = Path(__file__).resolve().parents[1] / "data" / "questions.jsonl"


@dataclass(frozen=True)
class SftFlags(ProgramFlags):
    """Flags of this program; the original has --dev as a flag, and the others as constants."""

    model: str = flag(help="folder of checkpoints or of a run, or the name of a run in logs", path=PathUse.FOLDER)
    dev: bool = flag(False, "the shipped pairs, one layer, steps of 4 instead of 64 pairs")
    data: str | None = flag(None, "chat pairs, see docs/finetuning.md", path=PathUse.PREFIX)
    layers: int | None = flag(None, "layers at the end that are trained; 4, with --dev 1", at_least=1)
    batch_size: int | None = flag(None, "pairs of a forward pass; 4, with --dev 2", at_least=1)
    lr: float = flag(6e-5, "learning rate after a warm-up over a tenth of the run", above=0)
    epochs: int = flag(1, "passes over the pairs", at_least=1)
    output: str | None = flag(
        None, "folder of the run; logs/SFT/ and the name of the model's run if unset", path=PathUse.FOLDER
    )

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if (self.data is None) is not self.dev:
            yield "Give either --data FILE, the chat pairs, or --dev, which has its own."

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        found = checkpoints_of(self.model)
        named = found.parent if found.name == "ckpt" else found
        return Path(self.output) if self.output is not None else Path("logs", "SFT", named.resolve().name)

    def trainer_arguments(self) -> list[str]:
        """The trainer's command line, without the architecture and what is frozen."""
        batch = self.batch_size or (2 if self.dev else 4)
        folder = self.folder
        return [
            *("--finetune", "--load", str(checkpoints_of(self.model)), "--save", str(folder / "ckpt")),
            *("--run-dir", str(folder), "--tensorboard-dir", str(folder / "tb"), "--log-style", "all_in_one"),
            *("--data-path", self.data or str(_DEV_PAIRS), "--split", "9,1,0", "--loss-on-targets-only"),
            *("--data-cache-path", str(folder / "index-cache"), "--epochs", str(self.epochs)),
            *("--micro-batch-size", str(batch), "--global-batch-size", str(4 if self.dev else 64)),
            *("--lr", str(self.lr), "--lr-decay-style", "constant", "--lr-warmup-fraction", "0.1"),
            *("--weight-decay", "0", "--clip-grad", "0", "--log-interval", "10", "--eval-interval", "25"),
            *("--eval-iters", "2", "--save-interval", "50", "--keep-last", "1", "--keep-best"),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tunes, exports, and returns the exit code of `megatron.errors.ExitCode`."""
    begin_rank()
    flags, others = read_program(SftFlags, sys.argv[1:] if argv is None else argv, "sft.py", __doc__ or "")
    arguments = [
        *_network_arguments(checkpoints_of(flags.model), flags.layers or (1 if flags.dev else 4)),
        *flags.trainer_arguments(),
    ]
    code = pretrain_gpt.train([*arguments, *others], PROGRAM)
    if code == 0 and log.is_first_rank():
        _export(flags.folder)
    return code


def _network_arguments(checkpoints: Path, trained_layers: int) -> list[str]:
    """The flags of a checkpoint's architecture and tokenizer, and of what is frozen: all but the last layers and norm.

    Raises:
        CheckpointError: no checkpoint exists.
        ConfigError: it has fewer layers.
    """
    from megatron.checkpoint import newest_record
    from megatron.parallel.mesh import ParallelMesh
    from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
    from trident.convert.hugging_face.model_file import model_flags

    found = newest_record(checkpoints, ParallelMesh.single())
    if found is None:
        raise CheckpointError(f"no checkpoint in {checkpoints} (--model). Use the folder of a run.")
    config = RunConfig.from_json(found.record["config"])
    model, choice = config.model, TokenizerChoice.of(config.data).or_copy_next_to(found.path)
    if trained_layers >= model.num_layers:
        raise ConfigError(
            f"--layers {trained_layers} of the {model.num_layers} layers of {found.path} leaves nothing to freeze. "
            "Train fewer, or use pretrain_gpt.py --finetune."
        )
    arguments = ["--seq-length", str(config.data.seq_length)]
    for name, value in model_flags(model, choice, build_tokenizer(choice)):
        arguments += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    frozen = [f"decoder.layers.{layer}.*" for layer in range(model.num_layers - trained_layers)]
    head = ["output_layer.*"] if model.untie_embeddings_and_output_weights else []
    return [*arguments, "--freeze", "embedding.*", *frozen, *head]


def _export(run: Path) -> None:
    from megatron.checkpoint import newest_record
    from megatron.parallel.mesh import ParallelMesh
    from tools.convert import export_hf

    found = newest_record(run / "ckpt", ParallelMesh.single())
    if found is not None and not (run / "hf" / found.path.name).exists():
        export_hf.main(["--load", str(found.path), "--output", str(run / "hf" / found.path.name)])


if __name__ == "__main__":
    process_exit.exit_with(main)
