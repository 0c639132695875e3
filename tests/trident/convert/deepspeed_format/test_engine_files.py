"""What the real DeepSpeed writes is imported and resumed: losses continue as DeepSpeed's own resume does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpoint import read_record
from megatron.errors import ConversionError
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, losses, train, write_tiny_corpus
from tests.trident.convert.deepspeed_format.upstream_network import train_with_deepspeed
from tests.trident.convert.foreign.foreign_files import (
    VOCABULARY,
    Foreign,
    check_equal,
    foreign,
    gpt2_arguments,
    save,
    write_pipeline,
)
from tools.convert.import_megatron import main
from trident.convert.deepspeed_format.engine_files import read_shards, shapes_of
from trident.convert.foreign import open_foreign
from trident.convert.megatron_format.foreign_model import ForeignPieces
from trident.convert.megatron_format.torch_files import ImportOptions

# The pipelines come last: DeepSpeed keeps their groups for every later engine of the process.
CASES = [("plain", 1, "fp32"), ("plain", 3, "fp32"), ("pipeline", 1, "fp32"), ("pipeline", 1, "bf16")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def written(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    results = run_ranks(train_with_deepspeed, 2, str(folder), corpus.flags(), CASES)
    return folder, results[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_of_deepspeed_is_continued(
    case: tuple[str, int, str], written: tuple[Path, list[list[float]]], corpus: TinyCorpus, tmp_path: Path
) -> None:
    folder, expected = written
    tokenizer = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        corpus.vocab_file,
        "--merge-file",
        corpus.merge_file,
    ]
    imported = tmp_path / "imported"
    source = folder / "-".join(map(str, case))
    assert main([str(source), "--save", str(imported), *tokenizer]) == 0
    record = read_record(imported / "iter_0000003")
    assert record["optimizer_updates"] == 3 and record["progress"]["consumed_samples"] == 12
    flags = ["--config", str(imported / "model.yaml"), "--load", str(imported), "--data-path", corpus.prefix]
    flags += ["--train-iters", "6", "--run-dir", str(tmp_path / "run"), "--log-interval", "1", "--eval-iters", "0"]
    flags += ["--data-cache-path", str(corpus.folder / "cache")]
    assert train(flags, world_size=1) == (0, "")
    ours = losses(tmp_path)
    tolerance = 3e-6 if case[2] == "fp32" else 5e-3
    theirs = dict(zip((4, 5, 6), expected[CASES.index(case)], strict=True))
    assert ours == pytest.approx(theirs, abs=tolerance)


def test_what_the_converter_of_deepspeed_makes_of_it_is_the_same(written: tuple[Path, list[list[float]]]) -> None:
    folder = written[0] / "pipeline-1-fp32"
    choices = ImportOptions(VOCABULARY)
    engine, universal = open_foreign(folder, choices), open_foreign(folder / "universal" / "global_step3", choices)
    assert (engine.format, universal.format) == ("DeepSpeed", "DeepSpeed universal")
    universal.check()
    assert engine.state == universal.state and engine.parts.keys() == universal.parts.keys()
    pairs = zip(ForeignPieces(engine), ForeignPieces(universal), strict=True)
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in pairs)


SHAPES: dict[int, Any] = {0: [{"a": (3, 2), "b": (2,)}]}


def stage_three(rank: int) -> dict[str, Any]:
    """One of two ranks' shares: 3 of a's 6 elements, 1 of b's 2."""
    values = torch.arange(4.0) + 10 * rank
    inner = {"state": {0: {"exp_avg": values + 100, "exp_avg_sq": values + 200, "step": torch.tensor(5.0)}}}
    return {"fp32_flat_groups": [values], "optimizer_state_dict": inner, "partition_count": 2, "zero_stage": 3}


def write(folder: Path, *states: dict[str, Any]) -> Path:
    """The optimizer files of data-parallel ranks."""
    for rank, state in enumerate(states):
        save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def test_shares_are_put_together(tmp_path: Path) -> None:
    found = read_shards(write(tmp_path, stage_three(0), stage_three(1)), SHAPES)
    values = {(name, kind): part.read().flatten().tolist() for _, name, kind, part in found.tensors}
    assert values["a", "weight"] == [0, 1, 2, 10, 11, 12] and values["b", "exp_avg"] == [103, 113]
    assert values["a", "exp_avg_sq"] == [200, 201, 202, 210, 211, 212]
    assert found.updates == 5 and found.problem is None


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="1 optimizer shards of model-parallel rank 0, not 2"):
        read_shards(write(tmp_path, stage_three(0)), SHAPES)


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConversionError, match=r"hold 6 elements of a \(weight\), whose shape is \[4, 2\]|elements up to"
    ):
        states = [stage_three(0), stage_three(1)]
        read_shards(write(tmp_path / "more", *states), {0: [{"a": (4, 2), "b": (2,)}]})
    short = {**stage_three(1), "fp32_flat_groups": [torch.arange(2.0)]}
    with pytest.raises(ConversionError, match="elements up to 3 for a, and has 2"):
        read_shards(write(tmp_path / "short", stage_three(0), short), SHAPES)
    mapping = {"single_partition_of_fp32_groups": [torch.arange(4.0)], "param_slice_mappings": [{"a": 5}]}
    with pytest.raises(ConversionError, match=r"hold 0 elements of a \(weight\)"):
        read_shards(write(tmp_path / "mapping", mapping), SHAPES)
    with pytest.raises(ConversionError, match="holds no optimizer_state_dict"):
        save([1], tmp_path / "list" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        read_shards(tmp_path / "list", SHAPES)


def test_what_older_versions_leave_out_is_explained(tmp_path: Path) -> None:
    assert "no optimizer states" in str(read_shards(tmp_path, SHAPES).problem)
    older = {"single_partition_of_fp32_groups": [torch.arange(8.0)], "base_optimizer_state": {}}
    assert "older DeepSpeed" in str(read_shards(write(tmp_path, older), SHAPES).problem)
    assert shapes_of({"param_shapes": {"a": (2,)}}) == [{"a": (2,)}] and shapes_of({}) == []


def write_rank(folder: Path, made: Foreign, rank: int, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    """The files of one model-parallel rank with two data-parallel ranks: one flat tensor, cut in two."""
    names = list(tensors["weight"])
    flats = {kind: torch.cat([found[name].flatten() for name in names]) for kind, found in tensors.items()}
    half = -(-flats["weight"].numel() // 2)
    for shard in range(2):
        mapping, place = {}, 0
        for name in names:
            numel = tensors["weight"][name].numel()
            first, last = max(place, shard * half), min(place + numel, (shard + 1) * half)
            if first < last:
                mapping[name] = fragment_address(last - first, first - shard * half)
            place += numel
        cut = {kind: flat[shard * half : (shard + 1) * half].clone() for kind, flat in flats.items()}
        state = {
            "base_optimizer_state": {
                "state": {0: {"exp_avg": cut["exp_avg"], "exp_avg_sq": cut["exp_avg_sq"]}},
                "param_groups": [{"step": 3}],
            },
            "single_partition_of_fp32_groups": [cut["weight"]],
            "param_slice_mappings": [mapping],
            "partition_count": [2],
        }
        save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{shard}_mp_rank_{rank:02d}_optim_states.pt")
    shapes = [{name: tensor.shape for name, tensor in tensors["weight"].items()}]
    content = {"module": None, "args": made.stored, "iteration": 3, "param_shapes": shapes}
    save(content, folder / f"mp_rank_{rank:02d}_model_states.pt")


def test_two_tensor_parallel_ranks_two_stages_and_two_shards(tmp_path: Path) -> None:
    made = foreign(gpt2_arguments(num_layers=2), ranks=2, stages=2)
    folder = write_pipeline(tmp_path, made) / "global_step3"
    for stage in range(2):
        for rank in range(2):
            tensors: dict[str, dict[str, torch.Tensor]] = {}
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                embedding = "embedding.word_embeddings.weight"
                found = {"tied_modules.embed.word_embeddings.weight": made.local(kind, embedding, rank)}
                if stage == 0:
                    positions = made.local(kind, "embedding.position_embeddings.weight", rank)
                    found["tied_modules.embed.position_embeddings.weight"] = positions
                found |= {f"{3 + stage}.{name}": value for name, value in made.block(kind, stage, rank).items()}
                for last in ("weight", "bias") if stage else ():
                    found[f"6.{last}"] = made.local(kind, f"decoder.final_layernorm.{last}", rank)
                tensors[kind] = found
            write_rank(folder, made, 2 * stage + rank, tensors)
    opened = open_foreign(folder, ImportOptions(VOCABULARY))
    check_equal(opened, made, moments=True)
    assert (
        opened.state.updates == 3 and opened.parts["decoder.final_layernorm.bias", "weight"][0].dtype == torch.float32
    )
