"""Every preset, built without memory, has the published number of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.config import Machine, ModelConfig, TokenizerFacts, parse, resolve
from megatron.config.files.flag_files import preset_names, preset_path
from megatron.config.run_config import frozen
from megatron.model.interface.network import LayerStack
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh

TABLE = Path(__file__).with_name("preset_parameters.txt")
PUBLISHED = {row[0]: row[1:] for row in map(str.split, TABLE.read_text().splitlines()) if row[0] != "#"}
# Presets that also say how to train; only data and tokenizer are missing.
# With the parameters at a vocabulary of 8,000 entries, and the steps.
RECIPES = {"laptop": (4_802_816, 200), "workstation": (81_660_672, 2000)}


def parameters(name: str) -> tuple[int, int]:
    """The parameters of the network as built, and as its layers state."""
    fields = {key: frozen(value) for key, value in yaml.safe_load(preset_path(name).read_text()).items()}
    config = ModelConfig(**fields, padded_vocab_size=fields["vocab_size"])
    layers = network_layers(config, ParallelMesh.single("meta"))
    built = LayerStack(layers)
    return sum(one.numel() for one in built.parameters()), sum(layer.cost.parameters for layer in layers)


def test_every_preset_is_checked() -> None:
    assert sorted({*PUBLISHED, *RECIPES}) == preset_names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_number_of_parameters(name: str) -> None:
    exact, *nominal = map(float, PUBLISHED[name])
    assert parameters(name) == (exact, exact)
    assert not nominal or exact == pytest.approx(nominal[0], rel=0.03)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_only_data_and_a_tokenizer(name: str) -> None:
    words = ["--model-preset", name, "--data-path", "text", "--vocab-file", "v.json", "--merge-file", "m.txt"]
    request = parse([*words, "--save", "folder", "--load", "folder"])
    machine = Machine("cpu", 2, supports_fp16=False, supports_bf16=True)
    config = resolve(request, machine, TokenizerFacts(8000, 0, "fingerprint"))
    layers = network_layers(config.model, ParallelMesh.single("meta"))
    assert (sum(layer.cost.parameters for layer in layers), config.optim.train_iters) == RECIPES[name]
