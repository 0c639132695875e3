"""What multi-token prediction does not go with is refused with the way out."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from tests.config.command_lines import small

ASKED = "--mtp-num-layers 2"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", f"{ASKED} does not go with --position-embedding-type learned_absolute: .* Use rope, alibi or none"),
        (
            "--position-embedding-type rope --objective prefix",
            f"{ASKED} does not go with --objective prefix, .* Use --objective causal, or drop",
        ),
        (
            "--position-embedding-type rope --kd --load-teacher teacher",
            f"{ASKED} does not go with --kd: a teacher predicts the next token alone. Drop one",
        ),
        (
            "--position-embedding-type rope --context-parallel-size 2 --attention-dropout 0",
            f"{ASKED} does not go with --context-parallel-size 2: a rank would need tokens that other ranks have. Use "
            "--tensor-model-parallel-size with --sequence-parallel",
        ),
        (
            "--position-embedding-type rope --hidden-size 30 --ffn-hidden-size 32 --kv-channels 8 "
            "--tensor-model-parallel-size 4",
            "--hidden-size 30 cannot be split over --tensor-model-parallel-size 4 ranks",
        ),
        (
            "--position-embedding-type rope --seq-length 2",
            f"{ASKED} does not go with --seq-length 2: .* no token to predict. Use at most 1, or longer samples",
        ),
        (
            "--position-embedding-type rope --curriculum-learning --curriculum-min-length 2 --curriculum-steps 4 "
            "--curriculum-length-step 2",
            f"{ASKED} does not go with the curriculum, whose first samples have 2: ",
        ),
        (
            "--position-embedding-type rope --bidirectional --objective masked",
            f"{ASKED} does not go with --bidirectional, with which a token has seen the ones after it",
        ),
        (
            "--position-embedding-type rope --mtp-loss-scaling-factor -1",
            "--mtp-loss-scaling-factor -1.0 is out of range. It must be at least 0",
        ),
    ],
)
def test_it_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        small(f"{ASKED} {flags}")


def test_its_blocks_are_like_the_last_one() -> None:
    model = small(
        f"{ASKED} --position-embedding-type rope --num-experts 4 8 --moe-layer-pattern 0 1 --attention-window 5 "
        "--attention-window-pattern 0 1 0 0"
    ).model
    assert [model.experts_of(layer) for layer in range(6)] == [1, 4, 1, 8, 8, 8]
    assert [model.window_of(layer) for layer in range(6)] == [None, 5, None, None, None, None]


def test_a_factor_without_depths_has_no_effect() -> None:
    (notice,) = small("--mtp-loss-scaling-factor 0.5").notices
    assert notice == "--mtp-loss-scaling-factor 0.5 has no effect without --mtp-num-layers."
