"""Operations of a step, and what follows from them."""

from __future__ import annotations

import pytest

from megatron.observe.speed import Workload, flops_per_sample, model_flops_per_sample
from megatron.parallel.schedule.building import build_schedule
from tests.train.samples import model_config


def test_flops_computed_by_hand() -> None:
    # s 36, L 2, h 12, V 96: 1 + 36/72 + 96/384 = 1.75; 36 * 2 * 144 = 10368
    assert flops_per_sample(model_config(), 36) == 24 * 3 * 10368 * 1.75
    assert flops_per_sample(model_config(), 36, recomputes=True) == 24 * 4 * 10368 * 1.75


def test_heads_of_an_encoder_compute_predicted_positions_only() -> None:
    model = model_config(bidirectional=True, masked_lm_head=True)
    blocks = 24 * 3 * 10368 * 1.5  # the same as of a GPT, without the 1/4 of its output head
    hidden, vocabulary = model.hidden_size, model.padded_vocab_size
    head = 3 * 36 * 0.75 * (2 * hidden * hidden + 2 * hidden * vocabulary)
    assert flops_per_sample(model, 36, predicted_share=0.25) == blocks + 0.25 * head


def test_flops_of_a_network_with_experts_are_those_of_the_chosen_ones() -> None:
    # 4 attention matrices, a router of 8 rows, 2 gated experts of width 5, attention; 3/4 of the head
    model = model_config(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=5, gated_linear_unit=True)
    block = 2 * (4 * 12 * 12 + 8 * 12 + 2 * 3 * 12 * 5) + 4 * 12 * 36
    assert flops_per_sample(model, 36) == 3 * 36 * (2 * block + 0.75 * 2 * 96 * 12)


def test_workload_of_a_model() -> None:
    workload = Workload.of(model_config(), 36, device_count=4, replica_count=2, parameters_without_embeddings=10)
    assert workload == Workload(36, 24 * 3 * 10368 * 1.75, 4, 2, 10, 24 * 3 * 10368 * (1.5 + 1 / 3))


def test_model_flops_are_six_for_each_parameter_and_token_and_those_of_attention() -> None:
    # 12 h^2 parameters in each of 2 layers, V h in the head; attention 12 L h s
    per_token = 6 * (2 * 12 * 12**2 + 96 * 12) + 12 * 2 * 12 * 36
    assert model_flops_per_sample(model_config(), 36) == 36 * per_token


@pytest.mark.parametrize(("stages", "batch", "ratio"), [(1, 8, None), (2, 8, 1 / 5), (4, 8, 3 / 7), (4, 2, 3 / 4)])
def test_the_bubble_shrinks_with_the_number_of_micro_batches(stages: int, batch: int, ratio: float | None) -> None:
    workload = Workload(36, 1.0, replica_count=2, stages=stages, micro_batch_size=1)
    assert workload.bubble_ratio(batch) == ratio


def test_the_bubble_is_that_of_the_schedule() -> None:
    workload = Workload(36, 1.0, stages=4, schedule="interleaved", chunks_per_rank=2)
    assert workload.bubble_ratio(8) == build_schedule("interleaved", 4, 2, 8).bubble_ratio
    two = Workload(36, 1.0, stages=2, chunk_costs=(1, 2))
    # The second stage works 4 x 6 units, after a forward pass of the first and before its backward pass.
    assert two.bubble_ratio(4) == pytest.approx(1 - (12 + 24) / (2 * 27))


def test_utilization_needs_a_peak_and_a_rate() -> None:
    workload = Workload(36, 1.0, device_count=2, model_flops_per_sample=10.0, peak_flops_per_second=100.0)
    assert workload.utilization_ratio(8.0) == 0.4
    assert workload.utilization_ratio(0.0) is None
    assert Workload(36, 1.0).utilization_ratio(8.0) is None


@pytest.mark.parametrize("recomputes", [False, True])
def test_shorter_samples_take_what_a_network_of_that_length_takes(recomputes: bool) -> None:
    whole = Workload.of(model_config(), 36, recomputes=recomputes, device_count=2)
    short, expected = whole.at_length(9), Workload.of(model_config(), 9, recomputes=recomputes, device_count=2)
    for name in ("flops_per_sample", "model_flops_per_sample", "attention_flops_per_sample"):
        assert getattr(short, name) == pytest.approx(getattr(expected, name))
    assert (short.tokens_per_sample, short.device_count) == (9, 2) and whole.at_length(36) is whole
