"""Time of a layer with experts, compared with the Mixtral layer of transformers, in turns in one process.

    python benchmarks/experts.py

Prints one JSON line per measurement, of a forward and a backward pass. Both have the same weights and input, on one CPU
thread unless --threads says otherwise; `difference` is the largest one of the outputs. Ours also computes its
load-balancing loss and the statistics of the routing. `ratio_to_IMPLEMENTATION` is how many times faster ours is than
transformers' `eager` loop over experts, and than its `grouped_mm`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags

if TYPE_CHECKING:
    import torch

    from megatron.parallel.mesh import ParallelMesh

IMPLEMENTATIONS = ("eager", "grouped_mm")


@dataclass(frozen=True)
class ExpertsFlags(ConfigSection):
    """Flags of this program."""

    hidden_size: int = flag(256, "width of the model", at_least=8)
    ffn_hidden_size: int = flag(896, "inner width of an expert", at_least=8)
    num_experts: int = flag(8, "experts", at_least=2)
    topk: int = flag(2, "experts per token", at_least=1)
    tokens: int = flag(1024, "tokens of a micro-batch", at_least=1)
    rounds: int = flag(15, "rounds of each", at_least=2)
    threads: int = flag(1, "threads", at_least=1)
    bf16: bool = flag(False, "bfloat16 instead of float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both layers in turns and prints the measurements."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(ExpertsFlags, words, prog="experts.py", description=__doc__ or "")
    os.environ.update(OMP_NUM_THREADS=str(flags.threads), DS_ACCELERATOR="cpu")

    import torch

    torch.set_num_threads(flags.threads)
    hidden = torch.randn(1, flags.tokens, flags.hidden_size, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(torch.bfloat16 if flags.bf16 else torch.float32)
    layers = build_layers(flags)
    settings = {"dtype": "bf16" if flags.bf16 else "fp32", "experts": flags.num_experts, "topk": flags.topk}
    with torch.no_grad():
        outputs = {name: layer(hidden) for name, layer in layers.items()}
    for name in IMPLEMENTATIONS:
        difference = (outputs["ours"].float() - outputs[name].float()).abs().max().item()
        print_figure("experts", "difference", difference, "absolute", implementation=name, **settings)
    seconds = in_turns(layers, hidden, flags.rounds)
    for name, found in seconds.items():
        milliseconds = [1000 * value for value in found]
        spread = (min(milliseconds), max(milliseconds))
        print_figure("experts", f"{name}_step", statistics.median(milliseconds), "ms", spread=spread, **settings)
    for name in IMPLEMENTATIONS:
        ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds[name], strict=True)]
        spread = (min(ratios), max(ratios))
        print_figure("experts", f"ratio_to_{name}", statistics.median(ratios), "ratio", spread=spread, **settings)
    return 0


def build_layers(
    flags: ExpertsFlags, mesh: ParallelMesh | None = None, capacity_factor: float | None = None, shared: int = 0
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Our layer and those of transformers, with the same weights; ours alone in a mesh.

    Args:
        shared: inner width of a shared expert, which those of transformers do not have.
    """
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    from megatron.config import ModelConfig
    from megatron.model.blocks.experts import Experts
    from megatron.model.interface.step_context import StepContext
    from megatron.parallel.mesh import ParallelMesh

    sizes = {"hidden_size": flags.hidden_size, "num_attention_heads": 1, "max_position_embeddings": flags.tokens}
    config = ModelConfig(
        **sizes,
        num_layers=1,
        ffn_hidden_size=flags.ffn_hidden_size,
        num_experts=flags.num_experts,
        moe_router_topk=flags.topk,
        moe_expert_capacity_factor=capacity_factor,
        moe_shared_expert_intermediate_size=shared,
        gated_linear_unit=True,
        activation_function="silu",
        vocab_size=1,
        padded_vocab_size=1,
    )
    dtype = torch.bfloat16 if flags.bf16 else torch.float32
    ours = Experts(config, mesh or ParallelMesh.single(), 0).to(dtype)
    generator = torch.Generator().manual_seed(2)
    for parameter in ours.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / flags.hidden_size**0.5)
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "ours": lambda hidden: ours(hidden, StepContext(torch.zeros(1, dtype=torch.int64)))
    }
    for name in IMPLEMENTATIONS if mesh is None else ():
        theirs = MixtralConfig(
            **sizes,
            intermediate_size=flags.ffn_hidden_size,
            num_local_experts=flags.num_experts,
            num_experts_per_tok=flags.topk,
            experts_implementation=name,
        )
        layer: Any = MixtralSparseMoeBlock(theirs).to(dtype)
        layer.gate.weight.data.copy_(ours.router.weight)
        layer.experts.gate_up_proj.data.copy_(ours.experts.linear_fc1.weight)
        layer.experts.down_proj.data.copy_(ours.experts.linear_fc2.weight)
        layers[name] = layer
    return layers


def in_turns(
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]], hidden: torch.Tensor, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a forward and backward pass in every round; the first round is a warm-up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(rounds + 1):
        for name in layers if turn % 2 else reversed(layers):
            leaf = hidden.clone().requires_grad_()
            started_at = time.perf_counter()
            layers[name](leaf).square().sum().backward()
            if turn:
                seconds[name].append(time.perf_counter() - started_at)
    return seconds


if __name__ == "__main__":
    process_exit.exit_with(main)
