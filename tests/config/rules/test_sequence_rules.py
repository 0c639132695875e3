"""What keeps a sequence from being divided over ranks is said in one sentence, with the nearest legal setting."""

from __future__ import annotations

import pytest

from megatron.config import Machine, TokenizerFacts, resolve
from megatron.config.sequence_rules import length_unit, padded_length
from megatron.config.world import fit_layout, world_problems
from megatron.errors import ConfigError
from tests.config.command_lines import small

PLAIN = "--attention-dropout 0 --num-attention-heads 4 --hidden-size 32 --seq-length 32 --max-position-embeddings 32 "
RING = PLAIN + "--context-parallel-size 4 "
SPLIT = PLAIN + "--tensor-model-parallel-size 2 --sequence-parallel "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            PLAIN + "--context-parallel-size 3",
            "--seq-length 32 cannot be divided over --context-parallel-size 3: .* multiples of 6. Use 30 or 36, or "
            "fewer ranks; padding needs --max-position-embeddings 36",
        ),
        (
            PLAIN + "--ds-sequence-parallel-size 8",
            r"4 attention heads cannot be exchanged between 8 ranks \(--ds-sequence-parallel-size 8\).*; use 4, or",
        ),
        (
            RING + "--cp-comm-type a2a --tensor-model-parallel-size 2",
            r"2 attention heads of each tensor-parallel rank \(--tensor-model-parallel-size 2\) cannot be .*use 2, or",
        ),
        (
            RING + "--attention-dropout 0.1",
            "--attention-dropout 0.1 does not go with --cp-comm-type p2p.*",
        ),
        (
            RING + "--objective prefix",
            "--objective prefix does not go with --cp-comm-type p2p.* Use --cp-comm-type a2a",
        ),
        (
            RING + "--objective multitask",
            "--objective multitask does not go with --cp-comm-type p2p.* Use --cp-comm-type a2a",
        ),
        (
            RING + "--cp-comm-type p2p a2a",
            r"--cp-comm-type takes one value, 2 given \(p2p a2a\). All layers have the same, since",
        ),
        (
            RING + "--cp-comm-type allgather",
            r"--cp-comm-type allgather is unknown. Use one of: p2p, a2a, a2a\+p2p. .*allgather, .* is p2p here",
        ),
        (PLAIN + "--context-parallel-size 0", "--context-parallel-size 0 is out of range"),
        (
            RING + "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 8",
            "product is --context-parallel-size 4, and got 8 8",
        ),
        (
            RING + "--num-experts 4 --curriculum-learning --curriculum-min-length 4 --curriculum-length-step 4 "
            "--curriculum-steps 9",
            "--curriculum-length-step 4 cannot be divided over --context-parallel-size 4.* multiples of 8. Use 8, or "
            "fewer ranks; routers would see padding",
        ),
        (
            RING + "--position-embedding-type rope --rope-scaling-type dynamic --rope-original-max-positions 16 "
            "--curriculum-learning --curriculum-schedule fixed_discrete --curriculum-lengths 8 12 "
            "--curriculum-max-steps 3",
            "--curriculum-lengths 12 cannot be divided.*; --rope-scaling-type dynamic depends on the length",
        ),
        (
            SPLIT + "--num-experts 4 --seq-length 31",
            "--seq-length 31 cannot be divided over --tensor-model-parallel-size 2 --sequence-parallel: lengths must "
            "be multiples of 2. Use 30 or 32, or drop --sequence-parallel; routers would see padding.",
        ),
        (
            SPLIT + "--seq-length 33 --max-position-embeddings 33",
            "--seq-length 33 cannot be divided.* Use 32 or 34, or drop .*; padding needs --max-position-embeddings 34",
        ),
        (
            SPLIT + "--num-experts 4 --curriculum-learning --curriculum-schedule fixed_discrete --curriculum-lengths 7 "
            "17 --curriculum-max-steps 3",
            "--curriculum-lengths 7 cannot be divided over --tensor-model-parallel-size 2 --sequence-parallel.* 6 or 8",
        ),
        (
            SPLIT + "--num-experts 4 --context-parallel-size 3",
            "--seq-length 32 cannot be divided over --context-parallel-size 3 --tensor-model-parallel-size 2 "
            "--sequence-parallel: lengths must be multiples of 6",
        ),
        (RING + "--compile", "--compile does not go with --context-parallel-size 4: ranks exchange messages"),
        (
            RING + "--cp-comm-type a2a+p2p",
            "--cp-comm-type a2a.p2p needs two --hierarchical-context-parallel-sizes, .* --context-parallel-size 4",
        ),
        (
            RING + "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
            "product is --context-parallel-size 4, and got 2 4",
        ),
        (
            RING + "--hierarchical-context-parallel-sizes 2 2",
            "--hierarchical-context-parallel-sizes 2 2 is for --cp-comm-type a2a.p2p, and it is p2p. Drop one of them.",
        ),
        (
            RING + "--cp-comm-type a2a --ds-sequence-parallel-size 2 --num-attention-heads 8",
            "--ds-sequence-parallel-size 2 and --cp-comm-type a2a both say which ranks exchange",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        small(text)
    assert len(caught.value.problems) == 1


def test_tokens_of_one_rank_are_not_divided() -> None:
    (notice,) = small("--sequence-parallel").notices
    assert "no effect with --tensor-model-parallel-size 1" in notice and "Use --tensor-model-parallel-size 2" in notice
    assert not small("--sequence-parallel --tensor-model-parallel-size 2").notices


def test_samples_are_padded_for_ranks_that_split_hidden_states() -> None:
    config = small(
        SPLIT + "--seq-length 31 --curriculum-learning --curriculum-min-length 4 "
        "--curriculum-length-step 3 --curriculum-steps 9"
    )
    assert padded_length(config.data.seq_length, config.parallel, causal=True) == 32


@pytest.mark.parametrize("more", ["", "--bidirectional --objective masked --masked-lm-head"])
def test_other_lengths_are_padded(more: str) -> None:
    config = small(f"{RING} --seq-length 30 {more}")
    causal = not config.model.bidirectional
    assert padded_length(config.data.seq_length, config.parallel, causal=causal) == 32
    assert padded_length(25, config.parallel, causal=causal) == (32 if causal else 28)


@pytest.mark.parametrize(
    ("text", "sizes", "units"),
    [
        ("--context-parallel-size 4", (4, 1), (8, 4)),
        ("--context-parallel-size 4 --cp-comm-type a2a", (1, 4), (4, 4)),
        ("--ds-sequence-parallel-size 2", (1, 2), (2, 2)),
        ("--context-parallel-size 2 --ds-sequence-parallel-size 2", (2, 2), (4, 4)),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
            (4, 2),
            (8, 8),
        ),
    ],
)
def test_flags_make_a_ring_of_groups(text: str, sizes: tuple[int, int], units: tuple[int, int]) -> None:
    request = small(PLAIN + text)
    assert (request.parallel.ring_size, request.parallel.ulysses_size) == sizes
    assert tuple(length_unit(request.parallel, causal=causal) for causal in (True, False)) == units


def test_ranks_that_share_a_sequence_read_the_same_samples() -> None:
    request = small(RING + "--global-batch-size 8 --micro-batch-size 1")
    tokenizer = TokenizerFacts(vocab_size=100, eod_id=0, fingerprint="none")
    config = resolve(request, Machine("cpu", 8, supports_fp16=False, supports_bf16=True), tokenizer)
    assert config.parallel.data_parallel_size == 2 and config.parallel.replica_size == 4


def test_processes_that_do_not_fit() -> None:
    request = small(RING + "--tensor-model-parallel-size 2")
    assert world_problems(request, 16) == []
    (problem,) = world_problems(request, 12)
    assert "which needs a multiple of 8 processes, and 12 were started. Start 8 or 16, or let 3 share one." in problem
    (problem,) = world_problems(request, 3)
    assert "needs a multiple of 8 processes, 4 to share each sequence, and 3 were started" in problem
    elastic = small(RING + "--elastic --global-batch-size 8")
    fitted, (notice,) = fit_layout(elastic, 8)[0], *[fit_layout(elastic, 2)[1]]
    assert fitted.parallel.sequence_size == 4 and "using 1 x 1 x 2 data x 1 of a sequence" in notice
