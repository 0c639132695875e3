"""NVIDIA's torch_dist layout, written by torch.distributed.checkpoint itself."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint

from megatron.errors import CheckpointError, ConversionError
from tests.trident.convert.foreign.foreign_files import VOCABULARY, Foreign, gpt2_arguments, save
from trident.convert.foreign import open_foreign
from trident.convert.megatron_format.arguments import model_config
from trident.convert.megatron_format.foreign_model import ForeignPieces
from trident.convert.megatron_format.sharding_rules import tensor_rules
from trident.convert.megatron_format.torch_files import ImportOptions

ARGUMENTS: dict[str, Any] = {
    "num_layers": 3, "transformer_impl": "transformer_engine", "swiglu": True, "ffn_hidden_size": 64,
    "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def written(arguments: argparse.Namespace | None = None) -> Foreign:
    """A network of NVIDIA's program."""
    stored = arguments or gpt2_arguments(**ARGUMENTS)
    for name in ("glu_activation", "deepspeed"):
        vars(stored).pop(name, None)
    return Foreign(model_config(vars(stored), VOCABULARY), stored, core_names=True)


def state_of(foreign: Foreign, *, stacked: bool, halves: bool) -> dict[str, Any]:
    """Names and tensors as NVIDIA's program saves them."""
    found: dict[str, Any] = {
        "args": foreign.stored,
        "rng_state": torch.zeros(3),
        "optimizer.state.step": torch.zeros(1),
    }
    blocks = [foreign.block("weight", layer, 0) for layer in range(foreign.config.num_layers)]
    for name in blocks[0]:
        values = [block[name] for block in blocks]
        if halves and name == "mlp.linear_fc1.weight":
            for place, letter in enumerate("wv"):
                found[f"decoder.layers.{name}_{letter}"] = torch.stack([value.chunk(2)[place] for value in values])
        elif stacked:
            found[f"decoder.layers.{name}"] = torch.stack(values)
        else:
            found |= {f"decoder.layers.{layer}.{name}": value for layer, value in enumerate(values)}
    for name in foreign.tensors["weight"]:
        if not name.startswith("decoder.layers."):
            found[name] = foreign.local("weight", name, 0)
    return found


def write(folder: Path, foreign: Foreign, *, stacked: bool = True, halves: bool = False, common: bool = False) -> Path:
    """A checkpoint of torch.distributed, with the arguments in it or next to it."""
    state = state_of(foreign, stacked=stacked, halves=halves)
    if common:
        save({"args": state.pop("args"), "iteration": 3, "checkpoint_version": 3.0}, folder / "common.pt")
    distributed_checkpoint.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize(("stacked", "halves", "common"), [(True, True, True), (False, False, False)])
def test_every_tensor_comes_out_as_it_went_in(stacked: bool, halves: bool, common: bool, tmp_path: Path) -> None:
    foreign = written()
    opened = open_foreign(
        write(tmp_path, foreign, stacked=stacked, halves=halves, common=common), ImportOptions(VOCABULARY)
    )
    opened.check()
    assert opened.format == "Megatron-LM (torch_dist)" and opened.model == foreign.config
    assert "only weights are imported" in opened.notes[0]
    pieces = ForeignPieces(opened)
    for name, rule in tensor_rules(foreign.config).items():
        assert torch.equal(pieces.tensor(rule, "weight"), foreign.tensors["weight"][name]), name


def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, written())
    metadata = folder / ".metadata"
    metadata.write_bytes(re.sub(rb"__0_0\.distcp", rb"../0_.distcp", metadata.read_bytes()))
    with pytest.raises(ConversionError, match=r"names the file '\.\./0_\.distcp'"):
        open_foreign(folder, ImportOptions(VOCABULARY))


def test_a_folder_that_is_incomplete_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, written())
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="but it has 100"):
        open_foreign(folder, ImportOptions(VOCABULARY))
    save([1], folder / "other.pt")
    (folder / "other.pt").replace(folder / ".metadata")
    with pytest.raises(ConversionError, match="lists no tensors"):
        open_foreign(folder, ImportOptions(VOCABULARY))
