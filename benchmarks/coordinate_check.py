"""Coordinate check of muP: the size of activations and logits after a few steps, over the width of the network.

    python benchmarks/coordinate_check.py --output docs/coordinate_check.png

Trains networks of growing width on the same random tokens, in the standard parametrization and in muP, and prints one
JSON line per figure: the mean absolute value of an activation after the last step. With muP it stays as it is while the
network grows; in the standard parametrization it grows with the width, and so the best learning rate falls.

Source: Yang et al., "Tensor programs V", 2022, appendix D.1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, ModelConfig, OptimConfig, flag, parse_flags
from megatron.engine.deepspeed_setup import build_optimizer, set_rates
from megatron.engine.optimizers.plans import plan_of
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import LayerKind, LayerStack
from megatron.model.interface.residual_sum import total
from megatron.model.interface.step_context import StepSettings
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.mesh import ParallelMesh

STANDARD, MUP = "standard", "muP"
HIDDEN, LOGITS = "last hidden states", "logits"
_HEAD_WIDTH, _VOCABULARY, _LAYERS, _BATCH, _LENGTH = 16, 96, 2, 4, 32


@dataclass(frozen=True)
class CheckFlags(ConfigSection):
    """Flags of this program."""

    widths: tuple[int, ...] = flag((64, 128, 256, 512), "hidden sizes; the first one is the base width", at_least=16)
    steps: int = flag(4, "steps of Adam", at_least=1)
    lr: float = flag(1e-2, "learning rate", above=0)
    seed: int = flag(1234, "seed of weights and tokens", at_least=1)
    output: str | None = flag(None, "file for the figure, such as figure.png (pip install matplotlib)")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures both parametrizations, prints the figures and draws them."""
    flags = parse_flags(CheckFlags, sys.argv[1:] if argv is None else argv, prog="coordinate_check.py",
                        description=__doc__ or "")  # fmt: skip
    found: dict[str, dict[int, Mapping[str, list[float]]]] = {}
    for name in (STANDARD, MUP):
        found[name] = {width: coordinates(width, flags, use_mup=name == MUP) for width in flags.widths}
        for width, sizes in found[name].items():
            for place, values in sizes.items():
                print_figure("coordinate_check", f"{place}, {name}", values[-1], "mean absolute value", width=width,
                             steps=flags.steps, learning_rate=flags.lr)  # fmt: skip
    if flags.output:
        draw(found, flags)
    return 0


def coordinates(width: int, flags: CheckFlags, *, use_mup: bool) -> Mapping[str, list[float]]:
    """The mean absolute value of the last block's output and of the logits, before every step and after the last."""
    base = {"use_mup": True, "mup_base_hidden_size": flags.widths[0], "mup_base_head_dim": _HEAD_WIDTH}
    model = ModelConfig(
        num_layers=_LAYERS, hidden_size=width, num_attention_heads=width // _HEAD_WIDTH, hidden_dropout=0.0,
        attention_dropout=0.0, max_position_embeddings=_LENGTH, vocab_size=_VOCABULARY, padded_vocab_size=_VOCABULARY,
        init_method_std=0.1, **(base if use_mup else {}),
    )  # fmt: skip
    mesh = ParallelMesh.single()
    stack = LayerStack(gpt_layers(model, mesh), seed=flags.seed)
    optim = OptimConfig(micro_batch_size=_BATCH, global_batch_size=_BATCH, train_iters=flags.steps, lr=flags.lr)
    optimizer = build_optimizer(plan_of(optim), stack, mesh)
    set_rates(optimizer, flags.lr)
    objective = LanguageModelObjective(mesh.tp, _VOCABULARY)
    sizes: dict[str, list[float]] = {HIDDEN: [], LOGITS: []}
    last = [layer for spec, layer in stack.named_layers() if spec.kind is LayerKind.BLOCK][-1]
    last.register_forward_hook(lambda module, inputs, output: sizes[HIDDEN].append(total(*output).abs().mean().item()))
    tokens = torch.randint(_VOCABULARY, (_BATCH, _LENGTH + 1), generator=torch.Generator().manual_seed(flags.seed))
    targets = {"labels": tokens[:, 1:], "loss_mask": torch.ones(_BATCH, _LENGTH)}
    for step in range(flags.steps + 1):
        logits = stack(tokens[:, :-1], StepSettings(seed=flags.seed).context(torch.arange(_BATCH)))
        sizes[LOGITS].append(logits.detach().abs().mean().item())
        if step < flags.steps:
            optimizer.zero_grad()
            (objective(logits, targets).loss_sum / tokens[:, 1:].numel()).backward()
            optimizer.step()
    return sizes


def draw(found: Mapping[str, Mapping[int, Mapping[str, list[float]]]], flags: CheckFlags) -> None:
    """Draws the sizes after every step over the width, a panel for each parametrization and place."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for row, place in enumerate((HIDDEN, LOGITS)):
        for column, name in enumerate((STANDARD, MUP)):
            panel = panels[row][column]
            for step in range(flags.steps + 1):
                sizes = [found[name][width][place][step] for width in flags.widths]
                panel.plot(flags.widths, sizes, marker="o", markersize=3, label=f"after {step} steps")
            panel.set(xscale="log", yscale="log", xticks=flags.widths, title=f"{place}, {name}")
            panel.set_xticklabels([str(width) for width in flags.widths])
            panel.minorticks_off()
    panels[0][0].set_ylabel("mean absolute value")
    panels[1][0].set_ylabel("mean absolute value")
    panels[1][0].legend(fontsize="small")
    for panel in panels[1]:
        panel.set_xlabel("hidden size")
    figure.savefig(str(flags.output), dpi=80)


if __name__ == "__main__":
    process_exit.exit_with(main)
