"""A forward pass through pipeline stages computes what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.inference.forward import Forward
from megatron.inference.loaded_model import open_checkpoint
from megatron.model.gpt import whole_logits
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.layouts import Layout
from tests.helpers.ranks import RankFailure, run_ranks
from tests.inference.checkpoints import make_checkpoint

TOKENS = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(3))
ROWS = torch.tensor([4, 11, 12, 23])  # of both texts


@pytest.fixture(scope="module", params=["tied", "untied"])
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    flags = [] if request.param == "tied" else ["--untie-embeddings-and-output-weights"]
    return make_checkpoint(tmp_path_factory.mktemp("model"), *flags)


def logits(rank: int, checkpoints: str, tp: int, pp: int) -> list[torch.Tensor | None]:
    """Logits of everything, of everything in two steps with caches, and of some places."""
    mesh = open_mesh(Layout(tp, pp)) if tp * pp > 1 else ParallelMesh.single()
    loaded = open_checkpoint(checkpoints, {}, mesh)
    forward, ids, caches = Forward(loaded), torch.arange(2), loaded.model.new_caches(12)
    with torch.inference_mode():
        whole = forward(TOKENS, StepSettings().context(ids))
        forward(TOKENS[:, :7], StepSettings().context(ids, caches=caches))
        rest = forward(TOKENS[:, 7:], StepSettings().context(ids, caches=caches))
        some = forward(TOKENS, StepSettings().context(ids), ROWS)
        return [None if part is None else whole_logits(part, mesh.tp, 300) for part in (whole, rest, some)]


def test_stages_and_shards_give_the_logits_of_one_process(checkpoints: Path) -> None:
    (whole, rest, some) = logits(0, str(checkpoints), 1, 1)
    assert whole is not None and rest is not None and some is not None
    torch.testing.assert_close(rest, whole[:, 7:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(some, whole.flatten(0, 1)[ROWS], rtol=1e-4, atol=1e-5)
    results = run_ranks(logits, 4, str(checkpoints), 2, 2)
    assert results[:2] == [[None] * 3] * 2  # the first stage
    for parts in results[2:]:
        for found, expected in zip(parts, (whole, rest, some), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_more_stages_than_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="2 layers cannot fill 3 pipeline stages"):
        run_ranks(logits, 3, str(make_checkpoint(tmp_path)), 1, 3)
