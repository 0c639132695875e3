"""Ranks that share a sequence: its length, their groups, and the processes that they need."""

from __future__ import annotations

import pytest

from megatron.config.elastic import fit_layout
from megatron.config.rules.checking import world_problems
from tests.config.command_lines import small

PLAIN = "--attention-dropout 0 --num-attention-heads 4 --hidden-size 32 --seq-length 32 --max-position-embeddings 32 "
RING = PLAIN + "--context-parallel-size 4 "
SPLIT = PLAIN + "--tensor-model-parallel-size 2 --sequence-parallel "


def test_samples_are_padded_for_ranks_that_split_hidden_states() -> None:
    config = small(
        SPLIT + "--seq-length 31 --curriculum-learning --curriculum-min-length 4 "
        "--curriculum-length-step 3 --curriculum-steps 9"
    )
    assert config.parallel.padded_length(config.data.seq_length, causal=True) == 32


@pytest.mark.parametrize("more", ["", "--bidirectional --objective masked --masked-lm-head"])
def test_other_lengths_are_padded(more: str) -> None:
    config = small(f"{RING} --seq-length 30 {more}")
    causal = not config.model.bidirectional
    assert config.parallel.padded_length(config.data.seq_length, causal=causal) == 32
    assert config.parallel.padded_length(25, causal=causal) == (32 if causal else 28)


def test_processes_that_do_not_fit() -> None:
    request = small(RING + "--tensor-model-parallel-size 2")
    assert world_problems(request, 16) == []
    (problem,) = world_problems(request, 12)
    assert "require a multiple of 8 processes, but this run has 12. Use 8 or 16, or 3 per sequence." in problem
    (problem,) = world_problems(request, 3)
    assert "requires a multiple of 8 processes, 4 per sequence, but this run has 3" in problem
    elastic = small(RING + "--elastic --global-batch-size 8")
    fitted, (notice,) = fit_layout(elastic, 8)[0], *[fit_layout(elastic, 2)[1]]
    assert fitted.parallel.sequence_size == 4 and "using 1 x 1 x 2 data x 1 sequence" in notice
