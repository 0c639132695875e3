"""The commands of docs/seeds/turkish_gpt2.md: doctor, corpus, token files, launchers, evaluation, export."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.inference.loaded_model import open_checkpoint
from megatron.model.interface.step_context import StepSettings
from megatron.observe.metrics_file import read_steps
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tasks import main as perplexity
from tests.helpers.networks import forward
from tests.inference.checkpoints import make_checkpoint
from tests.seeds.turkish_gpt2.guide import DOCUMENTS, ROOT, Guide

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("turkish")]


def test_001_1_doctor_shows_versions_backend_cores_and_what_is_off(turkish: Guide) -> None:
    """Its exit code was 0: the page's shell ends at the first command that fails."""
    said = turkish.output.partition("Wrote my-corpus.json")[0]
    assert "Training can start." in said
    found = dict(re.findall(r"^  \w+ +([\w -]+?)  +(\S.*)$", said, flags=re.M))
    assert found["torch"] == importlib.metadata.version("torch") and "gloo" in found and "index builder" in found
    assert (
        found["gloo"] == "available, and the default here" and found["--fp16"] == "not available on the CPU; use --bf16"
    )
    assert found["cores"] == f"{len(os.sched_getaffinity(0))} usable by this process"


def test_the_extra_of_the_page_exists(turkish: Guide) -> None:
    (extra,) = re.findall(r"^install \.\[(\w+)\]$", (turkish.folder / "pip.log").read_text(), flags=re.M)
    package = Path(ROOT, "pyproject.toml").read_text()
    needed, _, extras = package.partition("[project.optional-dependencies]")
    assert re.search(rf"^{extra} = \[", extras, flags=re.M)
    assert not re.search(r'"(apex|ninja|nvidia)', needed)


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


def test_a_tokenizer_of_lower_case_merges_both_letters_i_as_the_page_says(tmp_path: Path) -> None:
    letters = "abcdefghijklmnoprstuvyzçğıöşüİIĞDR"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    lower, case = (
        build_tokenizer(TokenizerChoice(name, str(tmp_path / "vocab.txt")))
        for name in ("BertWordPieceLowerCase", "BertWordPieceCase")
    )
    assert lower.encode("IĞDIR") == lower.encode("iğdir") == lower.encode("igdir")
    assert case.encode("IĞDIR") != case.encode("iğdir") != case.encode("igdir")


TOKENIZER = "--vocab gpt2-vocab.json --merge-file gpt2-merges.txt --tokenizer-type GPT2BPETokenizer --append-eod"


def read_pair(index: bytes, tokens: bytes) -> list[list[int]]:
    """The documents of a pair, read by nothing but the format's description.

    Source: Megatron's `.idx`: `MMIDIDX\\0\\0`, uint64 version, uint8 element type, uint64 sequences, uint64 boundaries
    of documents, int32 lengths, int64 first bytes, int64 boundaries.
    """
    assert index[:9] == b"MMIDIDX\0\0"
    version, kind, sequences, boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert (version, kind) == (1, 8), "uint16 where the vocabulary has fewer than 65,500 entries"
    place = 9 + struct.calcsize("<QBQQ")
    lengths = np.frombuffer(index, "<i4", sequences, place)
    starts = np.frombuffer(index, "<i8", sequences, place + 4 * sequences)
    edges = np.frombuffer(index, "<i8", boundaries, place + 12 * sequences)
    assert len(index) == place + 12 * sequences + 8 * boundaries
    assert len(tokens) == 2 * lengths.sum() and starts.tolist() == [0, *(2 * np.cumsum(lengths[:-1])).tolist()]
    assert edges[0] == 0 and edges[-1] == sequences
    parts = [np.frombuffer(tokens, "<u2", count, start) for count, start in zip(lengths, starts, strict=True)]
    return [np.concatenate(parts[first:last]).tolist() for first, last in pairwise(edges)]


def test_001_3_workers_programs_and_chunks_give_the_same_bytes(turkish: Guide) -> None:
    tool = "python tools/preprocess_data"
    turkish.run(
        f"{tool}.py --input my-corpus.json --output-prefix one {TOKENIZER} --workers 1\n"
        f"{tool}_dist.py --input my-corpus.json --output-prefix ranks {TOKENIZER}"
    )
    tokens, index = whole = turkish.pair("my-gpt2")
    for name in ("one", "ranks", "my-gpt2-cores", "meg-gpt2_oscar"):
        assert turkish.pair(name) == whole, name
    files = turkish.folder / "gpt2-vocab.json", turkish.folder / "gpt2-merges.txt"
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    found = read_pair(index, tokens)
    assert {ids[-1] for ids in found} == {tokenizer.eod_id}
    assert [tokenizer.decode(ids[:-1]) for ids in found] == turkish.texts()


def test_the_descriptions_of_merged_and_whole_files_agree(turkish: Guide) -> None:
    merged, whole = (read_sidecar(turkish.folder / f"{name}_text_document") for name in ("meg-gpt2_oscar", "my-gpt2"))
    assert merged is not None and whole is not None and merged.tokenizer == whole.tokenizer
    assert (merged.documents, merged.empty, merged.tokens) == (whole.documents, whole.empty, whole.tokens)
    assert whole.documents == DOCUMENTS
    assert not list(turkish.folder.glob("ranks_0*")), "parts of a finished run are removed"


def test_speeds_are_shown(turkish: Guide) -> None:
    assert f"Processed {DOCUMENTS} documents (" in turkish.output and " docs/s, " in turkish.output


def test_any_tokenizer_of_hugging_face(turkish: Guide) -> None:
    (ids,) = IndexedDataset(turkish.folder / "c4_en_train_text_document")[:]
    assert len(ids) == len("ılık iğde") + 1 and ids[-1] == 0


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


PROMPTS = "def main(argument):\n\nimport os\nthe last line without an end"
PROMPTS_OF_THE_EXAMPLE = ["Bir varmış, bir yokmuş.", "Iğdır", "İzmir"]
WINDOW, STRIDE = 32, 5
PUBLISHED = (
    " \n = Random numbers = \n \n A sequence of 1 @,@ 000 numbers , drawn ( without replacement ) from a list ; each "
    "is chosen once . \n The well @-@ known ' key ' sets the state of the generator . \n " * 2
)
PLAIN = (
    "\n= Random numbers =\n\nA sequence of 1,000 numbers, drawn (without replacement) from a list; each is chosen once."
    "\nThe well-known 'key' sets the state of the generator.\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and a file of prompts of different lengths."""
    folder = tmp_path_factory.mktemp("scenario")
    make_checkpoint(folder)
    (folder / "prompts.txt").write_text(PROMPTS)
    return folder


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_wikitext(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints = folder / "checkpoints"
    (tmp_path / "wiki.test.tokens").write_text(PUBLISHED)
    argv = ["--task", "WIKITEXT103", "--valid-data", str(tmp_path / "wiki.test.tokens"), "--load", str(checkpoints)]
    assert perplexity.main([*argv, "--overlapping-eval", str(STRIDE)]) == 0
    rule, text, again = capfd.readouterr().out.splitlines()[-3:]
    number = r"(\d\.\d{4}E[+-]\d\d)"
    found = re.fullmatch(
        rf" validation results on WIKITEXT103 \| avg loss: {number} \| ppl: {number} \| adjusted ppl: {number} \| "
        r"token ratio: (\d+\.\d+) \|",
        text,
    )
    assert found and rule == again == "-" * (len(text) + 1)
    loss, tokens = reference_loss(checkpoints)
    words = len(PUBLISHED.strip().split(" "))
    ratio = (tokens - 1) / (words - 1)
    loss_shown, ppl, adjusted, ratio_shown = map(float, found.groups())
    assert loss_shown == pytest.approx(loss, rel=1e-4)
    assert ppl == pytest.approx(math.exp(loss), rel=1e-3)
    assert adjusted == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-2)
    assert ratio_shown == ratio


def reference_loss(checkpoints: Path) -> tuple[float, int]:
    """The loss when each token is scored by the last window of upstream's that does not count it twice."""
    loaded = open_checkpoint(str(checkpoints), {}, ParallelMesh.single())
    tokens = loaded.tokenizer.encode(PLAIN * 2)
    assert len(tokens) > 3 * WINDOW
    nats = 0.0
    for place in range(1, len(tokens)):
        first = max(0, math.ceil((place - WINDOW) / STRIDE)) * STRIDE
        context = StepSettings().context(torch.zeros(1, dtype=torch.int64), first_sample=0)
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([tokens[first:place]]), context)[0, -1, : loaded.vocab_size]
        nats -= float(logits.float().log_softmax(-1)[tokens[place]])
    return nats / (len(tokens) - 1), len(tokens)


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
