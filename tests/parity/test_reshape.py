"""Any layout loads any other.

The contents of a checkpoint do not depend on the layout that wrote it, and training continues identically.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import load, read_tensors, save
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe, batch_tokens, forward

pytestmark = [
    pytest.mark.xdist_group("reshape"),  # one worker, so that each checkpoint is trained once
    pytest.mark.slow,
]
RECIPE = dataclasses.replace(Recipe(), steps=4, global_batch_size=4, learning_rate=3.0e-3)
SAVED_AFTER = 2
CROSS_LAYOUT_RATIO = 1.0e-6

# (tp, pp, dp), ZeRO stage: one for every optimizer DeepSpeed may return, in every direction of splitting
CASES = {
    "plain-zero0": ((1, 1, 1), 0),
    "plain-zero1": ((1, 1, 1), 1),
    "dp2-zero0": ((1, 1, 2), 0),
    "dp2-zero1": ((1, 1, 2), 1),
    "dp2-zero2": ((1, 1, 2), 2),
    "dp2-zero3": ((1, 1, 2), 3),
    "tp2-zero3": ((2, 1, 1), 3),
    "tp2pp2-zero0": ((2, 2, 1), 0),
    "tp2pp2-zero1": ((2, 2, 1), 1),
    "pp2dp2-zero1": ((1, 2, 2), 1),
    "tp2dp2-zero3": ((2, 1, 2), 3),
}


def train_and_save(rank, layout, stage, extra, folder):
    """Trains all steps, saves after some; returns losses, norms and what the pieces covered."""
    config = layout_config(RECIPE, layout, stage, extra)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    curve = []
    covered = {}
    for step in range(RECIPE.steps):
        if step == SAVED_AFTER:
            pieces = list(owned_pieces(engine))
            for key, tensor in pieces:
                assert tensor.numel() == key.numel
                kinds = covered.setdefault(key.name, {})
                kinds[key.kind] = kinds.get(key.kind, 0) + key.numel
            save(Path(folder), step, pieces, {"updates": engine.update_count}, mesh)
        result = engine.train_batch(local_batches(RECIPE, config, mesh, step, False), RECIPE.learning_rate)
        curve.append((result.loss, result.gradient_norm))
    return curve, covered


def load_and_train(rank, layout, stage, extra, folder):
    """Loads the checkpoint and trains the rest."""
    config = layout_config(RECIPE, layout, stage, extra)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    record = load(Path(folder) / f"iter_{SAVED_AFTER:07d}", pieces_to_load(engine), mesh)
    refresh_weights(engine, record["updates"])
    curve = []
    for step in range(SAVED_AFTER, RECIPE.steps):
        result = engine.train_batch(local_batches(RECIPE, config, mesh, step, False), RECIPE.learning_rate)
        curve.append((result.loss, result.gradient_norm))
    return curve


def world(layout):
    return layout[0] * layout[1] * layout[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of all cases, each written once: name, dtype flags -> (folder, curve, covered elements)."""
    made = {}

    def make(name, extra=()):
        if (name, extra) not in made:
            layout, stage = CASES[name]
            folder = tmp_path_factory.mktemp(name)
            results = run_ranks(train_and_save, world(layout), layout, stage, list(extra), str(folder))
            covered = {}
            for _, own in results:
                for parameter, kinds in own.items():
                    for kind, count in kinds.items():
                        total = covered.setdefault(parameter, {})
                        total[kind] = total.get(kind, 0) + count
            made[name, extra] = folder, results[0][0], covered
        return made[name, extra]

    return make


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_and_moment_is_yielded_once(name, saved):
    _, _, covered = saved(name)
    shapes = expected_shapes()
    assert covered.keys() == shapes.keys()
    for parameter, kinds in covered.items():
        assert kinds == dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), int(np.prod(shapes[parameter]))), parameter


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["plain-zero1", "dp2-zero2", "dp2-zero3", "tp2pp2-zero1", "pp2dp2-zero1"])
def test_bf16_stores_masters_and_both_moments(name, saved):
    _, _, covered = saved(name, ("--bf16",))
    shapes = expected_shapes()
    for parameter, shape in shapes.items():
        assert covered[parameter] == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), int(np.prod(shape))), parameter


# Float32 sums in another order: gradients differ by 1e-6 of the largest, and the first steps of Adam, which divide a
# gradient by its own size, move an element whose gradient is 100 times smaller by 1e-4 of a step.
STORED_RATIO = 2.0e-4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_all_layouts_store_the_same_tensors(name, saved):
    folder, _, _ = saved(name)
    reference, _, _ = saved("plain-zero0")
    step = f"iter_{SAVED_AFTER:07d}"
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        expected = dict(read_tensors(reference / step, kind=kind))
        for parameter, tensor in read_tensors(folder / step, kind=kind):
            known = expected[parameter]
            assert tensor.shape == known.shape
            if kind == "weight" and parameter.endswith("linear_qkv.bias"):
                tensor, known = without_keys(tensor), without_keys(known)
            scale = known.abs().max().item()
            assert (tensor - known).abs().max().item() <= STORED_RATIO * scale + 1.0e-12, (parameter, kind)


def without_keys(bias):
    """The biases of queries and values.

    A softmax does not notice what is added to all its scores, so the gradient of a key's bias is nothing but rounding.
    Adam scales it up to whole steps, which no bound on the values can hold, and which change no logit.
    """
    return bias.view(RECIPE.heads, 3, -1)[:, [0, 2]]


def stored_weights(folder):
    """The weights of a checkpoint, in the shapes of the reference."""
    shapes = expected_shapes()
    stored = read_tensors(folder / f"iter_{SAVED_AFTER:07d}", kind="weight")
    return {name: values.reshape(shapes[name]) for name, values in stored}


@pytest.mark.parametrize("name", CASES)
def test_all_layouts_store_a_network_with_the_same_logits(name, saved):
    folders = saved(name)[0], saved("plain-zero0")[0]
    networks = [stored_weights(folder) for folder in folders]
    tokens = batch_tokens(RECIPE, SAVED_AFTER)[:, :-1]
    found, expected = (forward(weights, tokens, RECIPE) for weights in networks)
    torch.testing.assert_close(found, expected, rtol=0, atol=STORED_RATIO * expected.abs().max().item())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("flags", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["plain-zero1", "dp2-zero3", "tp2pp2-zero1", "pp2dp2-zero1"])
def test_same_layout_resumes_bit_exactly(name, flags, saved):
    folder, curve, _ = saved(name, flags)
    layout, stage = CASES[name]
    resumed = run_ranks(load_and_train, world(layout), layout, stage, list(flags), str(folder))
    for per_rank in resumed:
        assert per_rank == curve[SAVED_AFTER:]


PAIRS = [
    ("tp2pp2-zero1", "tp2dp2-zero3"),
    ("plain-zero1", "tp2pp2-zero0"),
    ("plain-zero0", "pp2dp2-zero1"),
    ("dp2-zero2", "tp2pp2-zero1"),
    ("dp2-zero3", "plain-zero0"),
    ("pp2dp2-zero1", "dp2-zero0"),
    ("tp2dp2-zero3", "dp2-zero2"),
    ("dp2-zero1", "tp2-zero3"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_another_layout_continues_identically(source, target, saved):
    folder, curve, _ = saved(source)
    layout, stage = CASES[target]
    resumed = run_ranks(load_and_train, world(layout), layout, stage, [], str(folder))
    for (loss, norm), (true_loss, true_norm) in zip(resumed[0], curve[SAVED_AFTER:], strict=True):
        assert loss == pytest.approx(true_loss, rel=CROSS_LAYOUT_RATIO)
        assert norm == pytest.approx(true_norm, rel=1.0e-4)


def test_bf16_crosses_layouts(saved):
    folder, curve, _ = saved("tp2pp2-zero1", ("--bf16",))
    resumed = run_ranks(load_and_train, 1, (1, 1, 1), 1, ["--bf16"], str(folder))
    for (loss, _), (true_loss, _) in zip(resumed[0], curve[SAVED_AFTER:], strict=True):
        assert loss == pytest.approx(true_loss, rel=3.0e-2)


def test_multi_token_prediction_crosses_layouts(saved):
    flags = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights")
    folder, curve, covered = saved("tp2pp2-zero1", flags)
    assert covered["mtp.layers.0.eh_proj.weight"]["exp_avg"] == 2 * RECIPE.hidden_size**2
    assert covered["embedding.word_embeddings.weight"]["weight"] == RECIPE.vocab_size * RECIPE.hidden_size
    resumed = run_ranks(load_and_train, 1, (1, 1, 1), 0, list(flags), str(folder))
    for (loss, norm), (true_loss, true_norm) in zip(resumed[0], curve[SAVED_AFTER:], strict=True):
        assert loss == pytest.approx(true_loss, rel=CROSS_LAYOUT_RATIO)
        assert norm == pytest.approx(true_norm, rel=1.0e-4)


# With muP, a middle stage has fewer kinds of parameters than the first and the last.
SCALED_LEARNING_RATES = [
    *("--use-mup", "--mup-base-hidden-size", "8", "--mup-base-head-dim", "4"),
    *("--label-smoothing", "0.1", "--z-loss-coeff", "0.01"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_optimizer_groups_of_a_middle_stage_load_anywhere(flags, tmp_path):
    flags = [*SCALED_LEARNING_RATES, *flags]
    curve = run_ranks(train_and_save, 3, (1, 3, 1), 1, flags, str(tmp_path))[0][0]
    assert len({loss for loss, _ in curve}) == RECIPE.steps
    assert run_ranks(load_and_train, 3, (1, 3, 1), 1, flags, str(tmp_path))[0] == curve[SAVED_AFTER:]
    resumed = run_ranks(load_and_train, 2, (1, 1, 2), 3, flags, str(tmp_path))[0]
    ratio = 3.0e-2 if "--bf16" in flags else CROSS_LAYOUT_RATIO
    assert [loss for loss, _ in resumed] == pytest.approx([loss for loss, _ in curve[SAVED_AFTER:]], rel=ratio)


def expected_shapes():
    h, f, v, s = RECIPE.hidden_size, 4 * RECIPE.hidden_size, RECIPE.vocab_size, RECIPE.sequence_length
    shapes = {
        "embedding.word_embeddings.weight": (v, h),
        "embedding.position_embeddings.weight": (s, h),
        "decoder.final_layernorm.weight": (h,),
        "decoder.final_layernorm.bias": (h,),
    }
    for layer in range(RECIPE.num_layers):
        prefix = f"decoder.layers.{layer}."
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            shapes[prefix + norm + ".weight"] = shapes[prefix + norm + ".bias"] = (h,)
        for name, rows, columns in (
            ("self_attention.linear_qkv", 3 * h, h),
            ("self_attention.linear_proj", h, h),
            ("mlp.linear_fc1", f, h),
            ("mlp.linear_fc2", h, f),
        ):
            shapes[prefix + name + ".weight"] = (rows, columns)
            shapes[prefix + name + ".bias"] = (rows,)
    return shapes
