"""The commands of docs/seeds/turkish_gpt2.md: corpus, token files, launchers, evaluation, export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron.data.formats.indexed import IndexedDataset
from megatron.inference.loaded_model import open_checkpoint
from megatron.observe.metrics_file import read_steps
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.networks import forward
from tests.seeds.turkish_gpt2.guide import DOCUMENTS, Guide

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("turkish")]


PAIRS = (("I", "ı"), ("İ", "i"), ("I", "İ"), ("ı", "i"), ("IĞDIR", "iğdir"), ("ş", "s"), ("ğ", "g"))


def test_001_2_corpus_and_tokenizer_keep_every_letter(turkish: Guide) -> None:
    texts = turkish.texts()
    assert len(set(texts)) == DOCUMENTS and set("ıİIiğşçöüŞÇÖÜ") < set("".join(texts))
    files = turkish.folder / "gpt2-vocab.json", turkish.folder / "gpt2-merges.txt"
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    assert tokenizer.vocab_size == 700
    for text in (*texts, "ILIK İĞDE, ılık iğde: Iğdır, İĞDİR", *(letter for pair in PAIRS for letter in pair)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.encode(one) != tokenizer.encode(other) for one, other in PAIRS)
    assert "'ILIK İĞDE, ılık iğde'\n" in turkish.output
    assert f"round trip: {DOCUMENTS} of {DOCUMENTS} documents come back byte for byte" in turkish.output


TOKENIZER = "--vocab gpt2-vocab.json --merge-file gpt2-merges.txt --tokenizer-type GPT2BPETokenizer --append-eod"


def test_001_3_workers_programs_and_chunks_give_the_same_bytes(turkish: Guide) -> None:
    tool = "python tools/preprocess_data"
    turkish.run(
        f"{tool}.py --input my-corpus.json --output-prefix one {TOKENIZER} --workers 1\n"
        f"{tool}_dist.py --input my-corpus.json --output-prefix ranks {TOKENIZER}"
    )
    whole = turkish.pair("my-gpt2")
    for name in ("one", "ranks", "my-gpt2-cores", "meg-gpt2_oscar"):
        assert turkish.pair(name) == whole, name
    files = turkish.folder / "gpt2-vocab.json", turkish.folder / "gpt2-merges.txt"
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    found = [ids.tolist() for ids in IndexedDataset(turkish.folder / "my-gpt2_text_document")[:]]
    assert {ids[-1] for ids in found} == {tokenizer.eod_id}
    assert [tokenizer.decode(ids[:-1]) for ids in found] == turkish.texts()


def test_001_5_launchers_and_the_address_of_a_slurm_job(turkish: Guide) -> None:
    runs = sorted((turkish.folder / "runs").iterdir())
    steps = [step for run in runs for step in read_steps(run)]
    assert steps == [1, 2, 3, 4, 5, 6], "deepspeed, torch.distributed.launch under srun, variables set by hand"
    assert re.findall(r"resumed checkpoints/gpt2/iter_0+(\d): iteration \1", turkish.output) == ["2", "4"]
    assert "--master_addr node003 " in (turkish.folder / "srun.log").read_text()
    inside = turkish.output.rpartition("slurm\n")[2]
    assert "job 4711" in inside and "6 nodes, node003 to node011" in inside
    assert "node003, the node of rank 0" in inside
    assert "srun --nodes=6 --ntasks-per-node=4 python -u pretrain_gpt.py" in inside


def test_torchrun_and_plain_python_start_the_example(turkish: Guide) -> None:
    example = turkish.folder / "turkish-demo"
    assert sorted(read_steps(example / "run-pretrained")) == [1, 2, 3, 4]
    assert read_steps(example / "run-tuned")[1]["consumed_samples"] == 4, "fine-tuning begins anew"


PROMPTS_OF_THE_EXAMPLE = ["Bir varmış, bir yokmuş.", "Iğdır", "İzmir"]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.xdist_group("turkish")
def test_transformers_loads_the_exported_example(turkish: Guide) -> None:
    transformers = pytest.importorskip("transformers", reason="the export is checked against transformers")
    example = turkish.folder / "turkish-demo"
    model = transformers.GPT2LMHeadModel.from_pretrained(example / "exported", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(example / "exported")
    loaded = open_checkpoint(str(example / "pretrained"), {}, ParallelMesh.single())
    text = turkish.texts()[0][:80]
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == loaded.tokenizer.encode(text) and tokenizer.decode(ids[0]) == text
    with torch.inference_mode():
        ours = forward(loaded.model, ids, torch.tensor([0]))[..., : loaded.vocab_size]
        assert torch.allclose(model(ids).logits, ours, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.xdist_group("turkish")
def test_the_example_evaluates_and_generates(turkish: Guide) -> None:
    example = turkish.folder / "turkish-demo"
    assert re.search(
        r"validation results on WIKITEXT103 \| avg loss: .* \| adjusted ppl: .* \| token ratio: ", turkish.output
    )
    (task,) = json.loads((example / "results.json").read_text())["tasks"]
    assert task["count"] == 8 and 0 <= task["figures"]["exact_match"] <= 1
    assert len(records(example / "samples.jsonl")) == 2
    assert [record["prompt"] for record in records(example / "prompts.txt.out")] == PROMPTS_OF_THE_EXAMPLE
