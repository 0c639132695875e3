"""The real DeepSpeed 0.19.8 loads what is exported for it: weights, moments, counters; and trains on as ours does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpoint import read_tensors
from megatron.errors import ConversionError
from tests.helpers.networks import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import losses, train, write_tiny_corpus
from tests.trident.convert.megatron_output.loaded_by_deepspeed import STEPS, Case, load_with_deepspeed
from tests.trident.convert.megatron_output.networks import BLOOM, GPT2, LLAMA, ROTARY, check_comes_back, write_network
from tools.convert import export_megatron
from trident.convert.megatron_format.names import parameter_name
from trident.convert.megatron_output.output_tensors import CheckpointTensors
from trident.convert.megatron_output.universal_output import write_universal

# The pipeline comes last: DeepSpeed keeps its groups for every later engine of the process.
CASES: list[Case] = [("plain", 1, "fp32"), ("plain", 3, "fp32"), ("pipeline", 1, "bf16")]
NAMINGS = {"plain": "classic", "pipeline": "bigscience"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of ours that is saved halfway, and what DeepSpeed makes of the checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    corpus = write_tiny_corpus(folder)
    changes = {
        "num_attention_heads": 4, "attention_dropout": 0, "hidden_dropout": 0, "lr_decay_style": "constant",
        "lr_warmup_fraction": None, "min_lr": 0, "adam_beta2": 0.95, "train_iters": 2 * STEPS, "save_interval": STEPS,
        "eval_iters": 0,
    }  # fmt: skip
    flags = corpus.flags(folder=folder, **changes)
    assert train(flags) == (0, "")
    checkpoint = folder / "checkpoints" / f"iter_{STEPS:07d}"
    sources = {(stage, kind): str(folder / f"{kind}-{stage}") for kind, stage, _ in CASES}
    for (stage, kind), target in sources.items():
        words = ["--load", str(checkpoint), "--output", target, "--naming", NAMINGS[kind]]
        assert export_megatron.main([*words, *(["--keep-padding"] if stage == 3 else [])]) == 0
    found = run_ranks(load_with_deepspeed, 2, str(folder), corpus.flags(), CASES, sources)
    return {"folder": folder, "checkpoint": checkpoint, "losses": found[0], "ours": losses(folder)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deepspeed_loads_weights_and_moments(case: Case, loaded: dict[str, Any]) -> None:
    kind, stage, dtype = case
    model = tiny_config(num_layers=2)
    theirs: dict[str, list[torch.Tensor]] = {}
    for rank in range(2):
        path = loaded["folder"] / f"{kind}-{stage}-{dtype}-{rank}.pt"
        held, counters = torch.load(path)
        theirs |= held
        assert counters == (STEPS, STEPS * 4, STEPS, [float(STEPS)])
    expected = {parameter_name(name, NAMINGS[kind], model): name for name, _ in read_tensors(loaded["checkpoint"])}
    assert set(theirs) == set(expected)
    for number, moment in enumerate(("weight", "exp_avg", "exp_avg_sq")):
        ours = dict(read_tensors(loaded["checkpoint"], kind=moment))  # type: ignore[arg-type]
        for name, our_name in expected.items():
            found, tensor = theirs[name][number], ours[our_name]
            rows = tensor.shape[0] if "word_embeddings" in name else found.shape[0]
            assert torch.equal(found[:rows], tensor.reshape(rows, *found.shape[1:])), (name, moment)
            assert not found[rows:].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deepspeed_trains_on_as_ours_does(case: Case, loaded: dict[str, Any]) -> None:
    theirs = loaded["losses"][CASES.index(case)]
    ours = [loaded["ours"][step] for step in range(STEPS + 1, 2 * STEPS + 1)]
    assert theirs == pytest.approx(ours, abs=2e-5 if case[2] == "fp32" else 5e-3)


@pytest.mark.parametrize(("flags", "naming"), [(BLOOM, "bigscience"), (LLAMA, "classic"), (ROTARY, "deepspeedai")])
def test_it_comes_back_bit_by_bit(flags: str, naming: str, tmp_path: Path) -> None:
    written = write_network(tmp_path, flags)
    write_universal(written.request(tmp_path / "out", naming))
    check_comes_back(written, tmp_path / "out", moments=True)


@dataclass
class Fragment:
    """What DeepSpeed's loader asks a parameter of a tensor-parallel rank for, and where it puts the values."""

    weight: torch.Tensor
    optim_fragment: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def lp_fragment_address(self) -> fragment_address:
        return fragment_address(self.weight.numel(), 0)

    def get_hp_fragment(self) -> torch.Tensor:
        return self.weight.view(-1)


def test_deepspeed_divides_tensors_as_the_torch_layout_does(tmp_path: Path) -> None:
    written = write_network(tmp_path, LLAMA)
    request = written.request(tmp_path / "out", "classic", ranks=2)
    folder = write_universal(request)
    tensors = CheckpointTensors.of(request)
    for name in tensors.rules:
        for rank in range(2):
            expected = tensors.part(name, "weight", request.order, rank, 2, request.model.padded_vocab_size)
            parameter = torch.empty_like(expected)
            parameter._hp_mapping = fragment = Fragment(torch.empty_like(expected))  # type: ignore[attr-defined]
            place = str(folder / "zero" / parameter_name(name, "classic", request.model))
            step = load_hp_checkpoint_state(parameter, place, rank, 2)
            assert torch.equal(fragment.weight, expected), name
            moment = tensors.part(name, "exp_avg", request.order, rank, 2, request.model.padded_vocab_size)
            assert torch.equal(fragment.optim_fragment["exp_avg"].view_as(moment), moment)
            assert float(step) == 4


def test_files_say_how_ranks_divide_them(tmp_path: Path) -> None:
    swiglu = f"{GPT2} --ffn-hidden-size 48 --activation-function silu --gated-linear-unit"
    written = write_network(tmp_path, swiglu, moments=False)
    folder = write_universal(written.request(tmp_path / "out", "bigscience", 2, 2))
    assert (tmp_path / "out" / "latest_universal").read_text() == folder.name == "global_step4_universal"
    states = sorted(path.name for path in folder.glob("*mp_rank_*"))
    assert len(states) == 8 and states[0] == "mp_rank_00_model_states.pt"
    zero = folder / "zero"

    def entry(name: str) -> dict[str, Any]:
        content = torch.load(zero / name)
        return {key: list(value.shape) if key == "param" else value for key, value in content.items()}

    assert entry("tied_modules.embed.word_embeddings.weight/fp32.pt") == {
        "param": [600, 32], "cat_dim": 0, "vocab_tensor": True
    }  # fmt: skip
    assert entry("3.mlp.dense_h_to_4h.weight/fp32.pt") == {"param": [96, 32], "cat_dim": 0, "param_n_sub_params": 2}
    assert entry("4.mlp.dense_4h_to_h.weight/exp_avg.pt") == {"param": [32, 48], "cat_dim": 1}
    assert entry("6.bias/fp32.pt") == {"param": [32]}
    stored = torch.load(zero / "3.mlp.dense_h_to_4h.weight" / "fp32.pt")["param"]
    ours = dict(read_tensors(written.checkpoint.folder))["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(stored, torch.cat([ours[1], ours[0]]))  # bigscience: the gate comes last
    assert not torch.load(zero / "6.bias" / "exp_avg_sq.pt")["param"].any()
    assert float(torch.load(zero / "6.bias" / "step.pt")) == 0


def test_what_a_fork_has_no_words_for_is_refused(tmp_path: Path) -> None:
    llama = write_network(tmp_path, LLAMA)
    with pytest.raises(
        ConversionError, match="--naming bigscience: .*normalization RMSNorm would be read as LayerNorm"
    ):
        write_universal(llama.request(tmp_path / "out", "bigscience"))
    with pytest.raises(ConversionError, match="--naming deepspeedai: .*qk_layernorm True would be read as False"):
        write_universal(llama.request(tmp_path / "out", "deepspeedai"))
    assert not (tmp_path / "out").exists()
