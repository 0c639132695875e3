"""Adam's moments get their names from the order of the weights; where that cannot be, the reason is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trident.convert.foreign.foreign_files import (
    VOCABULARY,
    Foreign,
    check_equal,
    foreign,
    gpt2_arguments,
    save,
    write_torch_layout,
)
from trident.convert.foreign import open_foreign
from trident.convert.megatron_format.foreign_model import ForeignPieces
from trident.convert.megatron_format.sharding_rules import tensor_rules
from trident.convert.megatron_format.torch_files import ImportOptions, StoredMoments, moments_of
from trident.convert.pickles.reader import ForeignTensor


def tensor(*shape: int) -> ForeignTensor:
    """A tensor that is never read."""
    return ForeignTensor(Path("file.pt"), 0, torch.float32, 0, shape, (1,) * len(shape))


WEIGHTS = {"a.weight": tensor(4, 4), "a.bias": tensor(4), "b.weight": tensor(4)}


def state(*shapes: tuple[int, ...], step: Any = 7) -> dict[int, Any]:
    """The state of tensors of these shapes."""
    return {
        number: {"exp_avg": tensor(*shape), "exp_avg_sq": tensor(*shape), "step": step}
        for number, shape in enumerate(shapes)
    }


def groups(*numbers: list[int]) -> list[dict[str, Any]]:
    """Parameter groups: matrices, then vectors."""
    return [{"params": found, "weight_decay": 0.1 * (1 - place)} for place, found in enumerate(numbers)]


def test_two_groups_or_one() -> None:
    two = {"state": state((4, 4), (4,), (4,)), "param_groups": groups([0], [1, 2])}
    found = moments_of({"optimizer": two}, WEIGHTS)
    assert isinstance(found, StoredMoments) and found.updates == 7
    assert [name for name, kind, _ in found.tensors if kind == "exp_avg"] == ["a.weight", "a.bias", "b.weight"]
    one = {"state": state((4, 4), (4,), (4,), step=2.0), "param_groups": groups([0, 1, 2])}
    found = moments_of(one, WEIGHTS)
    assert isinstance(found, StoredMoments) and found.updates == 2


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"state": {}, "param_groups": groups([0], [1, 2])}, "a distributed optimizer keeps it apart"),
        ({"state": state((4,)), "param_groups": groups([0], [1])}, "groups do not match the stored weights"),
        ({"state": state((4,)), "param_groups": groups([0], [], [1, 2])}, "groups do not match"),
        ({"state": state((4, 4), (3,), (4,)), "param_groups": groups([0], [1, 2])}, "a.bias does not have its shape"),
    ],
)
def test_what_cannot_be_named_is_explained(optimizer: dict[str, Any], said: str) -> None:
    found = moments_of(optimizer, WEIGHTS)
    assert isinstance(found, str) and said in found


def test_the_fp32_weights_of_a_half_precision_run_are_taken(tmp_path: Path) -> None:
    made: Foreign = foreign(gpt2_arguments(num_layers=1, fp16=True))
    save(_content(made), tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    opened = open_foreign(tmp_path, ImportOptions(VOCABULARY))
    check_equal(opened, made, moments=True)
    assert opened.state.flags["fp16"] is True


def _content(made: Foreign) -> dict[str, Any]:
    """The same file with half-precision weights and the optimizer that goes with them."""
    names = list(made.block("weight", 0, 0))
    weights = {f"decoder.layers.0.{name}": made.block("weight", 0, 0)[name] for name in names}
    outside = {
        name: made.local("weight", name, 0)
        for name in tensor_rules(made.config)
        if not name.startswith("decoder.layers")
    }
    ordered = {**outside, **weights}
    moments = {
        kind: {
            **{name: made.local(kind, name, 0) for name in outside},
            **{f"decoder.layers.0.{name}": made.block(kind, 0, 0)[name] for name in names},
        }
        for kind in ("exp_avg", "exp_avg_sq")
    }
    matrices = [name for name, value in ordered.items() if value.dim() > 1]
    vectors = [name for name, value in ordered.items() if value.dim() == 1]
    numbered = [*matrices, *vectors]
    inner = {
        "state": {number: {kind: moments[kind][name] for kind in moments} for number, name in enumerate(numbered)},
        "param_groups": [
            {"params": list(range(len(matrices))), "weight_decay": 0.1, "step": 3},
            {"params": list(range(len(matrices), len(numbered))), "weight_decay": 0.0, "step": 3},
        ],
    }
    masters = [[ordered[name] for name in some] for some in (matrices, vectors)]
    return {
        "args": made.stored,
        "iteration": 3,
        "checkpoint_version": 3.0,
        "model": {name: value.half() for name, value in ordered.items()},
        "optimizer": {"optimizer": inner, "fp32_from_fp16_params": masters},
    }


def test_a_distributed_optimizer_is_left_out(tmp_path: Path) -> None:
    made = foreign(gpt2_arguments(num_layers=1))
    write_torch_layout(tmp_path, made, with_optimizer=False)
    opened = open_foreign(tmp_path, ImportOptions(VOCABULARY))
    assert "no optimizer state" in opened.notes[0] and not opened.has_moments
    assert opened.without_moments().state.progress.step == 0
    assert len(list(ForeignPieces(opened))) == len(tensor_rules(made.config))


def test_an_interleaved_pipeline(tmp_path: Path) -> None:
    """Chunk 0 of both stages comes before chunk 1 of both."""
    made = foreign(gpt2_arguments(num_layers=4), stages=2)
    for stage in range(2):
        content: dict[str, Any] = {"args": made.stored, "iteration": 3, "checkpoint_version": 3.0}
        for chunk in range(2):
            block = made.block("weight", 2 * chunk + stage, 0)
            content[f"model{chunk}"] = {f"decoder.layers.0.{name}": value for name, value in block.items()}
        if stage == 0:
            for name in ("word_embeddings", "position_embeddings"):
                key = f"embedding.{name}.weight"
                content["model0"][key] = made.local("weight", key, 0)
        else:
            for last in ("weight", "bias"):
                key = f"decoder.final_layernorm.{last}"
                content["model1"][key] = made.local("weight", key, 0)
        save(content, tmp_path / "interleaved" / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt")
    check_equal(open_foreign(tmp_path / "interleaved", ImportOptions(VOCABULARY)), made, moments=False)
