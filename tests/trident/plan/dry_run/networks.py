"""The small network whose layouts are simulated."""

from __future__ import annotations

from megatron.config import Machine, TokenizerFacts, parse, resolve
from trident.plan.dry_run.simulation import DryRun, simulate_run

NETWORK = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--hidden-dropout", "0", "--attention-dropout", "0", "--vocab-size", "128"),
    *("--lr", "1e-3", "--train-iters", "9", "--data-path", "x", "--vocab-file", "v", "--merge-file", "m", "--bf16"),
    *("--micro-batch-size", "1", "--global-batch-size", "32"),
)
TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--expert-model-parallel-size", "4")


def dry_run_of(flags: tuple[str, ...], size: int) -> DryRun:
    """A dry run of the network in a layout."""
    network = NETWORK
    for replaced, given in (("--train-iters", "--train-samples"), ("--data-path", "--data-path")):
        if given in flags:
            place = network.index(replaced)
            network = network[:place] + network[place + 2 :]
    machine = Machine("cuda", size, supports_fp16=True, supports_bf16=True)
    return simulate_run(resolve(parse([*network, *flags]), machine, TokenizerFacts(128, 1, "")), size)
