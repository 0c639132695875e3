"""The commands of the pages of docs/, run in order on small data; with --all only. The others parse them."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.sources.pairs import TokenPairs
from megatron.observe.metrics_file import read_steps
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.commands.guides import ROOT, blocks, page, run_commands, shortened, write_demo_data, write_demo_text
from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port
from tests.helpers.tiny_run import write_tiny_corpus
from tests.helpers.vocabulary import write_vocabulary
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.chat.tokenizers_with_tokens import DSGPT2_TOKENS
from tests.trident.convert.foreign.foreign_files import foreign, gpt2_arguments, write_torch_layout
from tests.trident.convert.megatron_output.networks import GPT2, write_network
from tools.convert import import_megatron
from trident.checkpoints.differences import compare
from trident.evaluate.results import read_results
from trident.evaluate.tasks.tasks_file import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_checkpoints(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        write_network(tmp_path / "run", GPT2, step=step)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "demo").symlink_to(tmp_path / "run" / "checkpoints")
    output, _ = run_commands(tmp_path, "\n".join(blocks("checkpoints.md")))
    assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == 150
    assert "EQUAL: all 28 tensors, bit for bit" in output  # the same random tensors at every step
    assert (tmp_path / "checkpoints" / "mean" / "iter_0000150").is_dir()
    assert len((tmp_path / "mean.jsonl").read_text().splitlines()) == 1
    assert "would delete copies/demo/iter_0000100" in output
    assert [path.name for path in (tmp_path / "copies" / "demo").glob("iter_*")] == ["iter_0000150"]
    assert (tmp_path / "exported" / "universal" / "latest_universal").is_file()
    assert (tmp_path / "exported" / "megatron" / "iter_0000150" / "mp_rank_01_001" / "model_optim_rng.pt").is_file()


def test_data(tmp_path: Path) -> None:
    for package in ("sentencex", "sentencepiece", "ftfy", "py3langid", "datasketch", "pyarrow"):
        pytest.importorskip(package)
    write_demo_text(tmp_path / "corpus.jsonl", 600_000, 4000)
    guide = shortened(
        "\n".join(blocks("data.md")),
        {
            "--train-iters 4 ": "--train-iters 4 --eval-iters 1 ",
            "--micro-batch-size 4 --global-batch-size 8 ": "--micro-batch-size 2 --global-batch-size 4 ",
        },
    )
    output, _ = run_commands(tmp_path, blocks("training.md")[0] + guide)
    data = tmp_path / "data"
    tokens = {path.name.removesuffix("_text_document.bin"): path.read_bytes() for path in data.glob("*_document.bin")}
    assert tokens["demo"] == tokens["demo-many"] == tokens["demo-dist"] == tokens["whole"] == tokens["back"]
    assert tokens["parts"] == tokens["job"] == tokens["ranks"] == tokens["stored"]
    assert IndexedDataset(str(data / "old_text_document")).dtype.name == "int32"
    sentences, documents = (
        IndexedDataset(str(data / name)) for name in ("sentences_text_sentence", "parts_text_document")
    )
    assert len(sentences.documents) == len(documents.documents) < len(sentences)
    assert json.loads((data / "clean-report.json").read_text())
    assert re.search(r"lm loss demo_text_document: \d\.\d+E[+-]\d+ \| lm loss windows\S*: ", output)
    assert len((data / "steps.jsonl").read_text().splitlines()) >= 8
    assert len((data / "spike.jsonl").read_text().splitlines()) == 2


def test_distillation(tmp_path: Path) -> None:
    write_demo_data(tmp_path)
    shorter = {"--train-iters 200": "--train-iters 4 --eval-iters 1", "interval 20": "interval 2"}
    output, errors = run_commands(tmp_path, shortened("\n".join(blocks("distillation.md")), shorter))
    assert "teacher: checkpoints/teacher/iter_0000004, 4 layers of width 64" in errors
    assert len(re.findall(r"iteration +[24]/ +4 .* kd loss: \d", output)) == 2


def test_evaluation(tmp_path: Path) -> None:
    for name in ("data", "checkpoints", "made"):
        (tmp_path / name).mkdir()
    checkpoints = make_checkpoint(tmp_path / "made")
    for name in ("demo", "other"):
        (tmp_path / "checkpoints" / name).symlink_to(checkpoints)
    vocabulary, merges = (str(checkpoints.parent / name) for name in ("demo-vocab.json", "demo-merges.txt"))
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", vocabulary, merges))
    with IndexedWriter(str(tmp_path / "data" / "demo_text_document"), np.uint16) as writer:
        for text in (ROOT / "examples" / "evaluation" / "text.txt").read_text().split("\n\n"):
            writer.add_document([np.array([*tokenizer.encode(text), tokenizer.eod_id])])
    output, _ = run_commands(tmp_path, "\n".join(blocks("evaluation.md")), examples=True)
    results = read_results(tmp_path / "results.json")
    assert [task["kind"] for task in results["tasks"]] == list(KINDS)
    for task in results["tasks"][:2]:
        assert list(task["baselines"]) == ["uniform", "unigram", "bigram"]
    for name in ("WIKITEXT103", "LAMBADA"):
        assert f" validation results on {name} | " in output
    assert "lambada:passages (lambada; 10 items)" in output


def test_finetuning(tmp_path: Path) -> None:
    questions = tmp_path / "examples" / "data" / "questions.jsonl"
    questions.parent.mkdir(parents=True)
    questions.write_text((ROOT / "examples" / "data" / "questions.jsonl").read_text())
    (tmp_path / "data").mkdir()
    tokenizer = build_tokenizer(write_vocabulary(tmp_path / "data"))
    with IndexedWriter(str(tmp_path / "data" / "demo_text_document"), np.uint16) as writer:
        for line in questions.read_text().splitlines():
            writer.add_document([np.array([*tokenizer.encode(line), tokenizer.eod_id])])
    printed = "".join(run_commands(tmp_path, "\n".join(blocks("finetuning.md"))))
    assert re.search(r"train: 2\d\d examples of examples/data/questions.jsonl in \d+ rows of 257 tokens, 9\d", printed)
    assert "resumed checkpoints/chat/iter_0000005: iteration 5" in printed
    assert (tmp_path / "examples" / "data" / "index-cache").is_dir()


def test_foreign_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    corpus = write_tiny_corpus(tmp_path / "data")
    theirs = foreign(gpt2_arguments(num_layers=2), ranks=2)
    for name, value in theirs.tensors["weight"].items():
        value.mul_(0.05)
        theirs.tensors["exp_avg"][name].mul_(1e-3)
        theirs.tensors["exp_avg_sq"][name].abs_().mul_(1e-4)
    write_torch_layout(tmp_path / "theirs", theirs)
    commands = "\n".join(blocks("foreign_checkpoints.md", "(?:bash|shell)"))
    commands = shortened(commands, {"--train-iters ": "--eval-iters 0 --train-iters "})
    # The importer starts a child with flags that only an interpreter understands.
    commands = commands.replace(
        "python tools/convert/import_megatron.py", f"{sys.executable} tools/convert/import_megatron.py"
    )
    printed = "".join(run_commands(tmp_path, commands))
    assert "resumed checkpoints/imported" in printed and "finetuning the weights" in printed
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", corpus.vocab_file]
    tokenizer += ["--merge-file", corpus.merge_file]
    imported = OpenCheckpoint.newest(tmp_path / "checkpoints" / "imported")
    for exported in ("for-deepspeed", "for-megatron"):
        again = tmp_path / f"again-{exported}"
        assert import_megatron.main([str(tmp_path / exported), "--save", str(again), *tokenizer]) == 0
        comparison = compare(imported, OpenCheckpoint.newest(again), with_moments=True)
        assert comparison.holds_same_tensors and not comparison.progress, exported


def test_generation(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "made").mkdir()
    (tmp_path / "checkpoints" / "demo").symlink_to(make_checkpoint(tmp_path / "made"))
    program = "\n".join(blocks("generation.md", "python"))
    (tmp_path / "program.py").write_text(program + "print(len(text), best[0].score)\n")
    output, _ = run_commands(tmp_path, "\n".join([*blocks("generation.md"), "python program.py"]))
    greedy, drawn, best, free = (
        [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").split("\n") if line]
        for name in ("prompts.txt.out", "drawn.jsonl", "best.jsonl", "samples.jsonl")
    )
    assert [len(records) for records in (greedy, drawn, best, free)] == [2, 6, 4, 4]
    assert set(greedy[0]) == {"prompt", "text", "tokens", "length", "finished"}
    assert set(best[0]) == {*greedy[0], "score"}
    assert float(output.split()[-1]) < 0


def test_launching(tmp_path: Path) -> None:
    write_demo_data(tmp_path, documents=300)
    commands = "\n".join(blocks("launching.md"))
    output, errors = run_commands(tmp_path, f"PORT={free_port()}\n{commands}", examples=True)
    assert "6 ranks: 2 tensor x 1 pipeline x 3 data" in errors
    (notice,) = re.findall(r"```console\nwarning: (--elastic: .*)\n", page("launching.md"))
    assert notice in errors, "the page shows another message"
    assert output.count("ssh -T") == 3 and output.count("srun --nodes=") == 2 and output.count("env RANK=") == 2
    assert "--shard 3/4" in output and "my-gpt2_shard4of4_text_document" in output
    assert max(read_steps(tmp_path / "runs" / "two-nodes")) == 4
    assert (tmp_path / "checkpoints" / "elastic" / "iter_0000006").is_dir()


@pytest.mark.parametrize(("flag", "length"), [("--sequence-parallel", " 512"), ("--context-parallel-size", " 4096")])
def test_long_sequences(tmp_path: Path, flag: str, length: str) -> None:
    write_demo_data(tmp_path)
    (block,) = (text for text in blocks("long_sequences.md") if flag in text)
    shorter = {"--train-iters 200": "--train-iters 2 --eval-iters 1 --log-interval 1", length: " 32"}
    output, _ = run_commands(tmp_path, shortened(block, shorter))
    assert re.search(r"iteration +2/ +2 .* lm loss: \d", output)


def test_masked_language_models(tmp_path: Path) -> None:
    pytest.importorskip("sentencex")
    (tmp_path / "data").mkdir()
    write_demo_text(tmp_path / "corpus.jsonl", 60_000, 2000)
    shorter = {
        "--train-iters 4 ": "--train-iters 2 ",
        "--train-iters 20": "--train-iters 4",
        "--train-iters 30": "--train-iters 6",
    }
    commands = shortened("\n".join(blocks("masked_language_models.md")), shorter)
    output, errors = run_commands(tmp_path, commands)
    assert "resumed checkpoints/bert/iter_0000004" in errors
    after_training, evaluated = (
        re.findall(rf"valid loss at {point} \| lm loss value: (\S+)", output)
        for point in ("the end of training for val data", "iteration 6")
    )
    assert evaluated == [after_training[1]], "the same masked tokens in another layout"
    assert len(re.findall(r"\| lm loss: \S+ \| sop loss: \S+ \|", output)) == 3
    assert len(re.findall(r"\| lm loss: \S+ \| grad norm", output)) == 1, "without a sentence order"
    assert {path.name.partition("-")[0] for path in (tmp_path / "runs").iterdir()} == {"bert"}


def test_operations(tmp_path: Path) -> None:
    write_demo_data(tmp_path, documents=300)
    _, errors = run_commands(tmp_path, "\n".join(blocks("operations.md")))
    kept = {path.name for path in (tmp_path / "backup" / "guide").glob("iter_*")}
    assert {"iter_0000006", "iter_0000009", "iter_0000012"} <= kept and "iter_0000003" not in kept
    assert "resuming from the copy" in errors
    assert (tmp_path / "checkpoints" / "guide" / "iter_0000015").is_dir()


def test_prefix_language_models(tmp_path: Path) -> None:
    write_demo_data(tmp_path)
    commands = shortened("\n".join(blocks("prefix_lm.md")), {"--train-iters 40": "--train-iters 6"})
    _, errors = run_commands(tmp_path, commands)
    assert "Using loss reweighting" in errors
    assert "finetuning the weights of checkpoints/prefix/iter_0000006" in errors
    assert len(TokenPairs(str(tmp_path / "data" / "sums"))) == 800
    assert (tmp_path / "data" / "prompts.txt.out").read_text().startswith("{")


def test_recipes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_demo_data(tmp_path)
    train, rates, fp8 = (
        next(text for text in blocks("recipes.md") if program in text).strip()
        for program in ("pretrain_gpt.py", "benchmarks/optimizers.py", "benchmarks/fp8_curve.py")
    )
    shorter = {
        "--train-iters 240": "--train-iters 4 --eval-iters 1 --log-interval 1 --split 80,15,5",
        "--lr-wsd-decay-iters 24": "--lr-wsd-decay-iters 2",
        "--lr-warmup-iters 20": "--lr-warmup-iters 1",
        "--micro-batch-size 16 --global-batch-size 16": "--micro-batch-size 2 --global-batch-size 2",
    }
    output, _ = run_commands(tmp_path, shortened(train, shorter))
    assert re.search(r"iteration +4/ +4 .* lm loss: \d", output)
    assert json.loads((tmp_path / "exported" / "muon" / "proof.json").read_text())["is_equal"]
    rates = shortened(rates, {"0.003 0.01 0.03": "0.01", "docs/optimizers.png": "curves.png"})
    output, _ = run_commands(tmp_path, f"{rates} --steps 8 --seeds 1 --data data")
    assert {json.loads(line)["optimizer"] for line in output.splitlines()} == {"adam", "muon", "schedule-free"}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    output, _ = run_commands(tmp_path, f"{fp8} --steps 2 --num-layers 3 --runs rowwise --data data")
    records = [json.loads(line) for line in output.splitlines()]
    losses = {record["of"]: record["value"] for record in records if record["figure"] == "training loss"}
    (difference,) = (record["value"] for record in records if record["figure"] == "difference of training losses")
    assert difference == pytest.approx(100 * (losses["rowwise"] / losses["bf16"] - 1), abs=5e-3)


def test_serving(tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path, "--chat-template", "dsgpt2", more_tokens=DSGPT2_TOKENS, positions=128)
    (tmp_path / "chat").mkdir()
    checkpoints.rename(tmp_path / "chat" / "checkpoints")
    port, commands = str(free_port()), []
    for kind, block in re.findall(r"```(bash|python)\n(.*?)```", page("serving.md"), flags=re.S):
        if kind == "python":
            (tmp_path / "client.py").write_text(block.replace("4001", port))
            commands.append("python client.py")
        elif not block.startswith("torchrun"):  # run by test_serve.py
            commands.append(block.replace("4001", port).replace("--load checkpoints/chat", "--load chat/checkpoints"))
    # The signal is for the program, not for a shell around it.
    program = "\n".join([*commands, "kill -TERM $!", "wait $!"])
    program = re.sub(r"(^|\| )python ", rf'\1"{forking_python()}" ', program, flags=re.M)
    output, errors = run_commands(tmp_path, program)
    assert '{"input":"Hello","response":' in output and output.count("data: [DONE]") == 1
    assert '"object":"text_completion"' in output and "megatron_requests_total" in output
    assert "stopping: no request" in errors


def test_training(tmp_path: Path) -> None:
    write_demo_text(tmp_path / "corpus.jsonl", 600_000, 4000)
    text = "\n".join(blocks("training.md"))
    data, train, resume, chat, generate = (
        re.search(pattern, text, flags=re.S).group(0)  # type: ignore[union-attr]
        for pattern in (
            r"mkdir -p data.*?--workers 2\n",
            r"TOKENS=\(--data-path.*?--run-dir runs/demo\n",
            r"torchrun --nproc-per-node 4.*?--train-iters 300\n",
            r"printf '\{\"prompt\".*?chat.py [^\n]*\n",
            r"python tools/generate_samples_gpt.py.*?--out-seq-length 40\n",
        )
    )
    small = "--hidden-size 32 --num-layers 2 --ffn-hidden-size 64 --eval-iters 1 --log-interval 1 --save-interval 2"
    commands = [
        data,
        train.rstrip() + f" {small} --train-iters 2",
        resume.rstrip() + f" {small} --train-iters 3",
        chat.replace("--epochs 40", f"--epochs 1 {small}").replace("--greedy", "--greedy --max-new-tokens 3"),
        generate.replace("--top_p 0.9", "--top_p 0.9 --out-seq-length 5"),
    ]
    output, errors = run_commands(tmp_path, "\n".join(commands))
    assert "iteration        3/       3" in output
    assert "iter_0000002: iteration 2" in errors, "the second command resumes the first"
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4
    assert "iteration        1/       1" in output, "fine-tuning starts at 0"
    assert len((tmp_path / "prompts.txt.out").read_text().splitlines()) == 2


def test_watching_a_run(tmp_path: Path) -> None:
    write_demo_data(tmp_path, documents=100)
    output, _ = run_commands(tmp_path, "\n".join(blocks("watching_a_run.md")))
    assert "Self CPU" in output and "first, validation: " in output
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    first, second = (
        {record["learning_rate"] for record in read_steps(tmp_path / "runs" / name).values()}
        for name in ("first", "second")
    )
    assert max(first) > 1.5 * max(second) > 0
