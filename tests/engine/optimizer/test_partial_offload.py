"""A share of the optimizer's state on the host: which sub-groups stay on the device, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import load, save
from megatron.config import RunConfig
from megatron.engine.deepspeed_internals.set_up import keep_on_device
from megatron.engine.ds_config import SUB_GROUP_SIZE, deepspeed_config, sub_groups_to_keep, without_ratio
from megatron.engine.engine import Engine
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.optimizer.test_offloading import RECIPE
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches

SAVED_AFTER = 1


def settings_file(folder: Path, ratio: float, **zero: Any) -> list[str]:
    path = folder / f"ds-{ratio:g}.json"
    path.write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": ratio}, **zero}}))
    return ["--deepspeed_config", str(path)]


def train(engine: Engine, config: RunConfig, first: int) -> list[tuple[float, float]]:
    results = [
        engine.train_batch(local_batches(RECIPE, config, engine.mesh, step, uneven=False), RECIPE.learning_rate)
        for step in range(first, RECIPE.steps)
    ]
    return [(result.loss, result.gradient_norm) for result in results]


def train_and_resume(rank: int, folder: str) -> dict[str, Any]:
    """Curves with ratios 0.5 and 1, from the start, and from the checkpoint that the other one wrote."""
    curves: dict[str, Any] = {}
    ratios = (0.5, 1.0)
    for ratio in ratios:
        extra = ["--deepspeed_config", str(Path(folder) / f"ds-{ratio:g}.json")]
        config = layout_config(RECIPE, (1, 1, 2), 3, extra)
        engine = build_engine(config, open_mesh(config.parallel))
        wrapper = engine.deepspeed.optimizer
        if ratio < 1:
            sizes = [flat.numel() for flat in wrapper.fp32_partitioned_groups_flat]
            kept = sub_groups_to_keep(sizes, ratio)
            curves["kept"] = sum(sizes[number] for number in kept) / sum(sizes)
            assert wrapper.backup_optimizer is wrapper.optimizer and len(sizes) > 3
        step = train(engine, config, RECIPE.steps - SAVED_AFTER)
        place = Path(folder) / f"{ratio:g}"
        save(place, SAVED_AFTER, owned_pieces(engine), {"updates": engine.update_count}, engine.mesh)
        curves[f"{ratio:g}"] = step + train(engine, config, SAVED_AFTER)
    for ratio, other in zip(ratios, ratios[::-1], strict=True):
        config = layout_config(RECIPE, (1, 1, 2), 3, ["--deepspeed_config", str(Path(folder) / f"ds-{ratio:g}.json")])
        engine = build_engine(config, open_mesh(config.parallel))
        record = load(Path(folder) / f"{other:g}" / f"iter_{SAVED_AFTER:07d}", pieces_to_load(engine), engine.mesh)
        refresh_weights(engine, record["updates"])
        curves[f"resumed {ratio:g}"] = train(engine, config, SAVED_AFTER)
    return curves


def test_a_share_trains_saves_and_resumes_as_the_whole(tmp_path: Path) -> None:
    for ratio in (0.5, 1.0):
        settings_file(tmp_path, ratio, sub_group_size=1000)
    for found in run_ranks(train_and_resume, 2, str(tmp_path)):
        assert 0.3 < found["kept"] <= 0.5
        assert found["0.5"] == found["1"]
        assert found["resumed 0.5"] == found["resumed 1"] == found["1"][SAVED_AFTER:]


def test_sub_groups_stay_as_long_as_they_fit() -> None:
    assert sub_groups_to_keep([40, 30, 20, 10], 0.3) == [0, 1]
    assert sub_groups_to_keep([40, 30, 20, 10], 0.45) == [0, 3]
    assert sub_groups_to_keep([40, 30, 20, 10], 1.0) == []
    assert sub_groups_to_keep([40, 30, 20, 10], 0.0) == [0, 1, 2, 3]


class Wrapper:
    """What `keep_on_device` reads and writes of DeepSpeed's stage-3 optimizer."""

    def __init__(self, device: str) -> None:
        self.fp32_partitioned_groups_flat = [torch.ones(size, requires_grad=True) for size in (6, 4)]
        for flat in self.fp32_partitioned_groups_flat:
            flat.grad = torch.zeros_like(flat)
        self.subgroup_to_device = {0: "cpu", 1: "cpu"}
        self.optimizer = torch.optim.AdamW(self.fp32_partitioned_groups_flat, fused=True)
        self.backup_optimizer = None


def check_moved(device: torch.device) -> Wrapper:
    wrapper = Wrapper(device.type)
    assert keep_on_device(wrapper, 0.6, device) == [1]
    first, second = wrapper.fp32_partitioned_groups_flat
    assert (first.device.type, second.device.type) == ("cpu", device.type)
    assert second.grad is not None and second.grad.device.type == device.type
    assert wrapper.subgroup_to_device == {0: "cpu", 1: device.type}
    assert wrapper.backup_optimizer is wrapper.optimizer
    return wrapper


def test_what_stays_is_moved_to_the_device() -> None:
    check_moved(torch.device("cpu"))


@pytest.mark.gpu
def test_one_optimizer_updates_both_places() -> None:
    wrapper = check_moved(torch.device("cuda"))
    for number, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
        flat.grad.fill_(1.0)
        wrapper.optimizer.param_groups[0]["params"] = [flat]
        wrapper.optimizer.step()
        assert (flat < 1).all(), number
        assert wrapper.optimizer.state[flat]["exp_avg"].device == flat.device


def test_deepspeed_sees_no_ratio() -> None:
    settings = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}
    assert without_ratio(settings)["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert settings["zero_optimization"]["offload_optimizer"]["ratio"] == 0.3


def test_sub_groups_are_small_enough_to_share(tmp_path: Path) -> None:
    config = layout_config(RECIPE, (1, 1, 1), 3, settings_file(tmp_path, 0.25))
    assert deepspeed_config(config)["zero_optimization"]["sub_group_size"] == SUB_GROUP_SIZE
    config = layout_config(RECIPE, (1, 1, 1), 3, settings_file(tmp_path, 0.5, sub_group_size=7))
    assert deepspeed_config(config)["zero_optimization"]["sub_group_size"] == 7
