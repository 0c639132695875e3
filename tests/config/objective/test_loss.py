"""The training loss."""

from __future__ import annotations

import pytest

from megatron.config import LossConfig
from megatron.errors import ConfigError
from tests.config.command_lines import small


def test_the_loss_is_the_plain_cross_entropy_unless_asked_otherwise() -> None:
    assert (LossConfig().z_loss_coeff, LossConfig().label_smoothing) == (0.0, 0.0)
    assert LossConfig().objective == "causal"


def test_objectives_that_may_weigh_positions_or_samples() -> None:
    assert LossConfig().loss_mean == "tokens"
    assert small("--objective prefix --reweight-loss-based-on-position-frequency").loss.objective == "prefix"
    assert [small(f"--loss-mean samples{more}").loss.loss_mean for more in ("", " --objective multitask")]


@pytest.mark.parametrize(("objective", "sees"), [("causal", False), ("prefix", True), ("multitask", True)])
def test_prefixes_and_inputs_are_seen_in_both_directions(objective: str, sees: bool) -> None:
    assert LossConfig(objective=objective).has_prefixes is sees


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"z_loss_coeff": -1e-4}, r"--z-loss-coeff -0\.0001 is out of range\. It must be at least 0\."),
        ({"label_smoothing": 1.0}, r"--label-smoothing 1\.0 is out of range\. It must be less than 1\."),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LossConfig(**values)
