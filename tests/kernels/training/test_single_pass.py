"""Updates with the gradients of a step's only backward pass as they are: the bits of those from float32 sums."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.engine.gradients.main_gradients import MainGradients
from megatron.engine.state import owned_pieces
from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native.library import Library, library
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

# Without clipping: the norm depends in its last bit on how tensors are cut.
RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, micro_batch_size=4, global_batch_size=4, clip=0.0)
PASSES = (1, 1, 2, 1)  # of each step
SEQUENCE, NORMS = "--sequence-parallel", "--log-grad-norm"
# ZeRO stage, flags, and whether the optimizer reads the gradients where the backward pass leaves them
CASES: list[tuple[int, list[str], bool]] = [
    (1, ["--bf16"], True),
    (1, [], True),
    (2, ["--bf16"], True),
    (1, ["--bf16", "--untie-embeddings-and-output-weights", "--ema-decay", "0.9"], True),
    (1, ["--bf16", NORMS], False),  # the norm of each layer is measured in the sums
    (1, ["--bf16", SEQUENCE], False),  # sums over ranks are taken in float32
]
Trained = tuple[list[tuple[float, float]], dict[str, torch.Tensor], list[bool]]


def _trained(rank: int, tp: int, kernels_at: str) -> list[tuple[Trained, Trained]]:
    """The curve, the state and whether each step left its gradients alone: as they are, and with sums in every step."""
    assert library(Path(kernels_at)) is not None
    results = []
    for stage, flags, _ in CASES if tp > 1 else CASES[:-1]:  # of two ranks also the last
        config = layout_config(RECIPE, (tp, 1, 1), stage, flags)
        mesh = open_mesh(config.parallel)
        pair = []
        for with_sums in (False, True):
            kernels = Kernels(optimizer=Implementation.CSRC)
            engine = build_engine(config, dataclasses.replace(mesh, kernels=kernels))
            sums = engine.view._sum
            assert isinstance(sums, MainGradients)
            sums._takes_unflattened &= not with_sums
            curve, alone = [], []
            for step, passes in enumerate(PASSES):
                batches = [*local_batches(RECIPE, config, mesh, step, True)] * passes
                result = engine.train_batch(batches, RECIPE.learning_rate)
                curve.append((result.loss, result.gradient_norm))
                alone.append(sums._has_single_pass)
            state = {str(key): values.clone() for key, values in owned_pieces(engine)}
            pair.append((curve, state, alone))
        results.append((pair[0], pair[1]))
    return results


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_of_one_pass_are_read_where_they_are(compiled: Library, tp: int) -> None:
    for results in run_ranks(_trained, tp, tp, str(compiled.folder)):
        for (_, flags, stays), (found, expected) in zip(CASES, results, strict=False):
            assert torch.allclose(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-6, atol=0), flags
            assert found[1].keys() == expected[1].keys() and len(found[1]) > 10
            assert all(torch.equal(found[1][name], values) for name, values in expected[1].items()), flags
            assert not any(expected[2]) and found[2] == [stays and passes == 1 for passes in PASSES], flags
