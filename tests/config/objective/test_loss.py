"""The training loss."""

from __future__ import annotations

import pytest

from megatron.config import LossConfig
from megatron.errors import ConfigError


def test_the_loss_is_the_plain_cross_entropy_unless_asked_otherwise() -> None:
    assert (LossConfig().z_loss_coeff, LossConfig().label_smoothing) == (0.0, 0.0)
    assert LossConfig().objective == "causal"


def test_positions_are_weighed_only_where_prefixes_are_random() -> None:
    sentence = r"--reweight-loss-based-on-position-frequency is for --objective prefix.*this is --objective causal"
    with pytest.raises(ConfigError, match=sentence):
        LossConfig(reweight_loss_based_on_position_frequency=True)
    assert LossConfig(objective="prefix", reweight_loss_based_on_position_frequency=True)


@pytest.mark.parametrize("objective", ["causal", "multitask"])
def test_the_mean_may_be_taken_over_samples(objective: str) -> None:
    assert LossConfig().loss_mean == "tokens"
    assert LossConfig(objective=objective, loss_mean="samples")


def test_random_prefixes_have_a_mean_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"--loss-mean samples is for .*; --objective prefix normalizes its loss"):
        LossConfig(objective="prefix", loss_mean="samples")


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
