"""The benchmarks compare like with like, and print machine-readable measurements."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from benchmarks import experts, experts_over_ranks, index, mesh
from benchmarks.plain_gpt import PlainGPT
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import build_gpt, forward, tiny_config
from tests.helpers.ranks import run_ranks


def _copy_weights(ours: LayerStack, plain: PlainGPT, heads: int) -> None:
    """Gives the plain network our weights; rows of qkv are [heads, 3, d] here and [3, heads, d] there."""
    source = dict(ours.named_parameters())

    def reordered(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)

    pairs = {
        "words.weight": source["embedding.word_embeddings.weight"],
        "positions.weight": source["embedding.position_embeddings.weight"],
        "norm.weight": source["decoder.final_layernorm.weight"],
        "norm.bias": source["decoder.final_layernorm.bias"],
    }
    for layer in range(len(plain.blocks)):
        for theirs, our_name in (
            ("norm1", "input_layernorm"),
            ("qkv", "self_attention.linear_qkv"),
            ("projection", "self_attention.linear_proj"),
            ("norm2", "pre_mlp_layernorm"),
            ("fc1", "mlp.linear_fc1"),
            ("fc2", "mlp.linear_fc2"),
        ):
            for part in ("weight", "bias"):
                tensor = source[f"decoder.layers.{layer}.{our_name}.{part}"]
                pairs[f"blocks.{layer}.{theirs}.{part}"] = reordered(tensor) if theirs == "qkv" else tensor
    plain.load_state_dict({name: tensor.detach() for name, tensor in pairs.items()})


def test_the_plain_model_is_the_same_model() -> None:
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0)
    ours, plain = build_gpt(config, ParallelMesh.single()), PlainGPT(config)
    _copy_weights(ours, plain, config.num_attention_heads)
    tokens = torch.randint(0, 101, (3, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(plain(tokens), forward(ours, tokens, torch.arange(3)), rtol=1e-4, atol=1e-5)
    assert sum(weight.numel() for weight in plain.parameters()) == sum(weight.numel() for weight in ours.parameters())


def test_the_index_benchmark_measures_a_corpus_that_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index.main(["--documents", "3000", "--seq-length", "128", "--repeats", "1", "--folder", str(tmp_path)]) == 0
    figures = {record["figure"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {"seconds_to_first_batch_cold_cache", "peak_own_memory_warm_cache", "build_to_cumsum"} <= set(figures)
    assert all(record["value"] > 0 for record in figures.values())
    assert figures["cache_on_disk"]["documents"] == 3000
    assert list(tmp_path.iterdir()) == []


def test_the_mesh_benchmark_counts_the_groups_of_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world-size", "96", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
    assert mesh.main(words) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    calls = {record["stage"]: record["value"] for record in records if record["figure"] == "new_group_calls"}
    # This rank alone, pp, dp, tp and model; the ends of a pipeline also embedding.
    assert calls == {"first": 6, "middle": 5}
    assert records[-1]["figure"] == "seconds_to_refuse_a_layout" and records[-1]["refused"] == 1


def test_the_experts_benchmark_compares_equal_layers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = ["--hidden-size", "16", "--ffn-hidden-size", "24", "--num-experts", "4", "--tokens", "12", "--rounds", "2"]
    assert experts.main(sizes) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    differences = {record["implementation"]: record["value"] for record in records if record["figure"] == "difference"}
    assert differences.keys() == {"eager", "grouped_mm"} and max(differences.values()) < 1e-4
    assert {record["figure"] for record in records} >= {"ours_step", "ratio_to_eager", "ratio_to_grouped_mm"}


def measured_over_ranks(rank: int) -> tuple[str, str]:
    """What is printed without and with a shared expert."""
    words = ["--hidden-size", "8", "--ffn-hidden-size", "8", "--num-experts", "4", "--tokens", "16", "--rounds", "2"]
    texts = []
    for more in ([], ["--shared", "8"]):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert experts_over_ranks.main([*words, *more]) == 0
        texts.append(printed.getvalue())
    return texts[0], texts[1]


def test_the_benchmark_of_divided_experts_counts_what_the_formula_says() -> None:
    pytest.importorskip("transformers")
    (lines, with_shared), nothing = run_ranks(measured_over_ranks, 2)
    records = [json.loads(line) for line in lines.splitlines()]
    times = {record["form"]: record["value"] for record in records if record["figure"] == "times_divided"}
    assert times.pop("divided") == 1.0 and times.keys() == {"capacity", "copies", "alone", "grouped_mm"}
    sent = {record["form"]: record["value"] for record in records if record["figure"] == "sent"}
    assert sent["capacity"] == sent["formula"] == 4 * (16 * 2 // 2) * 8 * 4
    assert sent["divided"] > 0 and nothing == ("", "")
    forms = {record["form"] for record in map(json.loads, with_shared.splitlines())}
    assert forms == {"divided", "capacity", "waiting", "copies", "alone", "formula"}
