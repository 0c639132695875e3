"""Checkpoints that megatron-core writes in several layouts compute its logits here, whichever GELU it used."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.networks import build_gpt, forward
from tests.helpers.projects.megatron_core import python_with_core
from tests.trident.convert.foreign.foreign_files import VOCABULARY
from trident.convert.foreign import open_foreign
from trident.convert.megatron_format.foreign_model import ForeignPieces
from trident.convert.megatron_format.sharding_rules import tensor_rules
from trident.convert.megatron_format.torch_files import ImportOptions

WRITER = Path(__file__).with_name("core_writer.py")
GPT2: dict[str, Any] = {
    "swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": True, "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False, "openai_gelu": False, "onnx_safe": None,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **GPT2, "swiglu": True, "add_bias_linear": False, "bias_gelu_fusion": False, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
NETWORKS: dict[str, tuple[dict[str, Any], str]] = {
    "fused": (GPT2, "gelu_tanh"),
    "exact": ({**GPT2, "bias_gelu_fusion": False}, "gelu"),
    "openai": ({**GPT2, "bias_gelu_fusion": False, "openai_gelu": True}, "gelu"),
    "no-bias": ({**GPT2, "bias_gelu_fusion": False, "add_bias_linear": False}, "gelu"),
    "llama": (LLAMA, "silu"),
    "limited": (
        {
            **LLAMA, "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 0.5,
        },
        "quick_gelu",
    ),
    "gated": ({**LLAMA, "attention_output_gate": True, "group_query_attention": True, "num_query_groups": 2}, "silu"),
}  # fmt: skip
CASES = [
    (network, form, tensor, pipeline)
    for network in NETWORKS
    for form in ("torch", "torch_dist")
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2))
    if network not in ("gated", "limited") or (form, pipeline) == ("torch", 1)
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case."""
    folder = tmp_path_factory.mktemp("core")
    cases = [
        {
            "folder": str(folder / f"{network}-{form}-{tensor}-{pipeline}"), "form": form, "tensor": tensor,
            "pipeline": pipeline, "arguments": NETWORKS[network][0],
        }
        for network, form, tensor, pipeline in CASES
    ]  # fmt: skip
    python = python_with_core(tmp_path_factory.mktemp("megatron-core"))
    words = [python, "-P", str(WRITER), json.dumps(cases)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("network", "form", "tensor", "pipeline"), CASES)
def test_the_logits_are_megatron_cores(written: Path, network: str, form: str, tensor: int, pipeline: int) -> None:
    folder = written / f"{network}-{form}-{tensor}-{pipeline}"
    opened = open_foreign(folder / "checkpoint", ImportOptions(VOCABULARY))
    opened.check()
    assert opened.model.activation_function == NETWORKS[network][1]
    expected = torch.load(folder / "logits.pt", weights_only=True)
    assert difference(opened, expected["tokens"], expected["logits"]) < 1e-6


def difference(opened: Any, tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of our logits, as a share of the largest logit."""
    pieces, rules = ForeignPieces(opened), tensor_rules(opened.model)
    ours = build_gpt(opened.model).eval()
    with torch.no_grad():
        for name, value in ours.named_parameters():
            value.copy_(pieces.tensor(rules[name], "weight").reshape(value.shape))
        logits = forward(ours, tokens, torch.arange(len(tokens)))[..., :VOCABULARY]
    return float((logits - expected).abs().max() / expected.abs().max())
