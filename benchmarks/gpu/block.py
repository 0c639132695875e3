"""The block of 345 million parameters that people begin with, in float16, through pretrain_gpt.py."""

from __future__ import annotations

import statistics

import pretrain_gpt
from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Target
from benchmarks.gpu.runs import corpus_flags, has_compiled_kernels
from megatron.observe.metrics_file import read_steps

# As bigscience's README gives it.
BLOCK = (
    *("--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--micro-batch-size", "4", "--global-batch-size", "8", "--lr", "0.00015"),
    *("--lr-decay-iters", "320000", "--lr-decay-style", "cosine", "--checkpoint-activations", "--fp16"),
)
TINY_BLOCK = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "4", "--global-batch-size", "8", "--lr", "0.005"),
    *("--lr-decay-iters", "320000", "--lr-decay-style", "cosine", "--checkpoint-activations"),
)
BLOCK_STEPS, TINY_STEPS = 20, 2


def train_the_block(context: Context) -> None:
    """20 steps of the 345M block in float16 through pretrain_gpt.py, on drawn tokens."""
    tokens, vocab = (16384, 257) if context.is_tiny else (2**21, 50257)
    count = TINY_STEPS if context.is_tiny else BLOCK_STEPS
    run_folder = context.scratch / "block"
    chosen = context.kernels or ("csrc" if has_compiled_kernels(context) else None)
    status = pretrain_gpt.main(
        [
            *([] if chosen is None else ["--kernels", chosen]),
            *(TINY_BLOCK if context.is_tiny else BLOCK),
            *corpus_flags(context.scratch / "data", vocab, tokens),
            *("--vocab-size", str(vocab), "--train-iters", "500000", "--exit-interval", str(count)),
            *("--lr-warmup-fraction", "0", "--log-interval", "1", "--eval-iters", "0", "--run-dir", str(run_folder)),
        ]
    )
    steps = read_steps(run_folder)
    context.recorder.figure("exit status", status, "", target=Target(at_most=0.0))
    context.recorder.figure("steps", len(steps), "", target=Target(at_least=count))
    if not steps:
        return
    for name in ("lm_loss", "loss_scale"):
        values = [step[name] for step in steps.values() if step.get(name) is not None]
        if values:
            context.recorder.note(name, f"{values[0]:.5g} at first, {values[-1]:.5g} at last")
    later = list(steps.values())[count // 2 :]
    rates = [step["tokens_per_second"] for step in later if step.get("tokens_per_second") is not None]
    if rates:
        context.recorder.figure("tokens per second, median of the second half", statistics.median(rates), "tokens/s")
