"""Upstream's zero-shot tasks, with upstream's flags and result lines.

    python tasks/main.py --task WIKITEXT103 --valid-data wiki.test.tokens --load checkpoints/gpt2 --overlapping-eval 32
    python tasks/main.py --task LAMBADA --valid-data lambada_test.jsonl --load checkpoints/gpt2 --strict-lambada

The network, its dtype and the tokenizer come from the checkpoint; flags of the trainer must agree with it.
tools/evaluate.py has the same tasks and more, with standard errors and baselines.

Source: bigscience Megatron-DeepSpeed `tasks/main.py`, `tasks/zeroshot_gpt/`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag
from megatron.config.program_flags import parse_over

if TYPE_CHECKING:
    from megatron.inference.loaded_model import LoadedModel
    from trident.evaluate.tasks.task import TaskResult

_WIKITEXT, _LAMBADA = "WIKITEXT103", "LAMBADA"
_CLASSIFICATION = (
    "it trains a classifier on top of an encoder: export the checkpoint with tools/convert/export_hf.py and fine-tune "
    "it with transformers, or use the multiple_choice task of tools/evaluate.py"
)
_RETRIEVAL = "it evaluates a retriever with two encoders, not a GPT checkpoint; use the retriever's own project"
_PROMPTED = "it prompts a server for dialogs; use the exact_match task of tools/evaluate.py, or tools/serve.py"
_REFUSED = {
    **dict.fromkeys(("RACE", "MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"), _CLASSIFICATION),
    **dict.fromkeys(("ICT-ZEROSHOT-NQ", "RETRIEVER-EVAL", "RET-FINETUNE-NQ"), _RETRIEVAL),
    **dict.fromkeys(("MSDP-PROMPT", "MSDP-EVAL-F1"), _PROMPTED),
}
_LARGEST_EXPONENT = 20


@dataclass(frozen=True)
class TaskFlags(ConfigSection):
    """Upstream's flags of this program, in addition to the trainer's."""

    task: str = flag(help=f"{_WIKITEXT} or {_LAMBADA}")
    valid_data: tuple[str, ...] = flag((), "path to the validation file", nargs="*", path=PathUse.PREFIX)
    overlapping_eval: int = flag(32, "stride of overlapping windows in tokens", at_least=1)
    strict_lambada: bool = flag(False, "predict all tokens of the last word, not only the last token")
    load: str = flag(
        help="folder of checkpoints (the newest valid one is used), or one checkpoint", path=PathUse.FOLDER
    )

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.task in _REFUSED:
            yield f"--task {self.task} is not supported: {_REFUSED[self.task]}."
        elif self.task not in (_WIKITEXT, _LAMBADA):
            yield f"--task {self.task} is unknown. Use {_WIKITEXT} or {_LAMBADA}."
        elif len(self.valid_data) != 1:
            yield f"--valid-data expects one file, got {len(self.valid_data)} ({' '.join(self.valid_data) or 'none'})."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program on the command line's flags."""
    request = parse_over(TaskFlags, sys.argv[1:] if argv is None else argv, "main.py", description=__doc__ or "")

    from megatron.inference.loaded_model import open_checkpoint
    from megatron.parallel.joining import close_mesh, open_mesh

    mesh = open_mesh(request.layout)
    try:
        loaded = open_checkpoint(request.flags.load, request.given, mesh)
        result = _measure(request.flags, request.given, loaded)
        text = f" validation results on {request.flags.task} | {_metrics(request.flags, result)}"
        for line in ("-" * (len(text) + 1), text, "-" * (len(text) + 1)):
            log.line(line)
    finally:
        close_mesh(mesh)
    return 0


def _measure(flags: TaskFlags, given: Mapping[str, Any], loaded: LoadedModel) -> TaskResult:
    """Runs the task without baselines."""
    from megatron.parallel.agreement import run_on_all
    from trident.evaluate.loaded_scorer import LoadedScorer
    from trident.evaluate.task_runner import run_tasks
    from trident.evaluate.tasks.lambada import Lambada
    from trident.evaluate.tasks.perplexity import Perplexity
    from trident.evaluate.tasks.task import TaskOptions

    data = flags.valid_data[0]
    task = Lambada(data=data, strict=flags.strict_lambada)
    if flags.task == _WIKITEXT:
        detokenizer = "ptb" if "ptb" in data else "wikitext"
        window = loaded.config.data.seq_length
        task = Perplexity(
            data=data, detokenizer=detokenizer, start="nothing", window=window, stride=flags.overlapping_eval
        )
    scorer = LoadedScorer(loaded, given.get("optim.micro_batch_size", loaded.config.optim.micro_batch_size))
    options = TaskOptions(agree=partial(run_on_all, loaded.mesh))
    ((outcome, failure),) = run_tasks(
        [task], scorer, loaded.tokenizer, options, shows_progress=loaded.mesh.world.rank == 0
    )
    if outcome.result is None:
        raise failure
    return outcome.result


def _metrics(flags: TaskFlags, result: TaskResult) -> str:
    """The metrics in upstream's format, which caps the exponent of a perplexity at 20."""
    metrics = result.figures
    if flags.task == _WIKITEXT:
        loss, ratio = metrics["loss"], metrics.get("token_ratio", math.nan)
        ppl, adjusted = (math.exp(min(_LARGEST_EXPONENT, nats)) for nats in (loss, loss * ratio))
        return f"avg loss: {loss:.4E} | ppl: {ppl:.4E} | adjusted ppl: {adjusted:.4E} | token ratio: {ratio} |"
    return (
        f"number correct: {metrics['acc'] * result.count:.4E} | total examples: {result.count:.4E} | "
        f"avg accuracy: {metrics['acc']:.4E}"
    )


if __name__ == "__main__":
    process_exit.exit_with(main)
