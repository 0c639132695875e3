"""Everything that can be known before the slow imports is refused then, in one list, and by one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.parse import RequestDraft, read_flags
from megatron.errors import CheckpointError, ConfigError, DataError, ExitCode, MegatronError, StorageError
from megatron.train.preflight.checks import checked_request
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2"}
# Runs the program where torch can be imported and must not be, and says whether it was.
PROGRAM = """
import os, sys
import pretrain_gpt
from megatron import process_exit
sys.argv[0] = "pretrain_gpt.py"
def main():
    try:
        return pretrain_gpt.main()
    finally:
        heavy = {"torch", "deepspeed", "transformers"} & set(sys.modules)
        os.write(2, f"imported: {sorted(heavy)}\\n".encode())
process_exit.exit_with(main)
"""


_REFUSALS = (
    "unknown flag --learning-rat",
    "--lr is required",
    "--fp16 is not supported on this machine (cpu: DS_ACCELERATOR=cpu). Use --bf16",
    "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 requires a multiple of 2 processes, but",
    "Type: torchrun --nproc-per-node 2 pretrain_gpt.py --",
    "bad.idx: the file (12 bytes) begins with b'garbage12'; a token index begins with",
    "none/corpus.idx does not exist (data prefix none/corpus).",
    "vocab.json (--vocab-file) begins with '[1]'; it must begin with {{",
    "--merge-file none.txt is not a file",
    "--eval-tasks tasks.yaml is not a file",
    "--load nowhere has no checkpoint, but --finetune needs its weights: it does not exist (the nearest",
    "--save file/checkpoints cannot be written: {folder}/file is not a folder",
    "--tensorboard-dir file/events cannot be written: {folder}/file is not a folder",
    "--log-path file/arguments cannot be written: {folder}/file is not a folder",
    "--metrics-file {folder} is a folder. Give the path of a regular file or a new one.",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def _one_process_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)


def refusal(reading: RequestDraft) -> MegatronError:
    with pytest.raises(MegatronError) as caught:
        checked_request(reading)
    return caught.value


def test_a_request_that_nothing_speaks_against_is_what_was_asked_for(corpus: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags(folder=tmp_path / "new")
    assert checked_request(read_flags(flags)) == read_flags(flags).request()
    assert list(tmp_path.iterdir()) == [], "nothing is made"


def test_flags_files_packages_and_processes_are_refused_together_without_torch(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    for name, text in (("bad.idx", "garbage12345"), ("bad.bin", ""), ("vocab.json", "[1]"), ("file", "")):
        (tmp_path / name).write_text(text)
    flags = corpus.flags(
        *("--fp16", "--finetune", "--learning-rat", "3"),
        lr=None,
        data_path=("1", "bad", "1", "none/corpus"),
        vocab_file="vocab.json",
        merge_file="none.txt",
        load="nowhere",
        save="file/checkpoints",
        save_interval=2,
        tensorboard_dir="file/events",
        log_path="file/arguments",
        metrics_file=tmp_path,
        eval_tasks="tasks.yaml",
        tensor_model_parallel_size=2,
        tokenizer_type="GPT2BPETokenizer",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, *options, *flags], cwd=tmp_path, env={**environment, **more},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for options, more in (
            (["-c", PROGRAM], {}),
            ([str(ROOT / "pretrain_gpt.py")], {**TORCHRUN, "RANK": "1", "LOCAL_RANK": "1"}),
            ([str(ROOT / "pretrain_bert.py"), "--lr", "1e3000"], {}),
        )
    ]  # fmt: skip
    (alone, second, bert) = ((process.communicate(timeout=120)[1], process.returncode) for process in started)
    said, code = alone
    assert code == ExitCode.USAGE
    assert "imported: []" in said
    found = [line.partition("error: ")[2] or line for line in said.splitlines()]
    for words in _REFUSALS:
        beginning = words.format(folder=tmp_path)
        assert sum(line.startswith(beginning) for line in found) == 1, beginning
    assert len(found) == 16, "and the line about imports"
    said, code = second
    assert code == ExitCode.USAGE
    assert said.startswith("[rank 1] error: unknown flag --learning-rat"), "no rank 0 was there to end this one"
    assert "--save" not in said, "only rank 0 looks at folders"
    said, code = bert
    assert code == ExitCode.USAGE
    assert '--lr expects a number, got "1e3000"' in said
    assert "--merge-file none.txt is not a file" in said


@pytest.mark.parametrize(
    ("changes", "kind", "code"),
    [
        ({"data_path": "none"}, DataError, ExitCode.DATA),
        ({"merge_file": "none"}, ConfigError, ExitCode.USAGE),
        ({"data_path": "none", "merge_file": "none"}, ConfigError, ExitCode.USAGE),
        ({"load": "none", "ckpt_step": 3}, CheckpointError, ExitCode.STORAGE),
        ({"log_path": "/dev/null/folder"}, StorageError, ExitCode.STORAGE),
        ({"data_path": "none", "log_path": "/dev/null/folder"}, DataError, ExitCode.DATA),
    ],
)
def test_the_exit_code_is_that_of_the_failure_or_of_the_flags(
    corpus: TinyCorpus, changes: dict[str, str], kind: type[MegatronError], code: ExitCode
) -> None:
    failure = refusal(read_flags(corpus.flags(**changes)))
    assert type(failure) is kind
    assert failure.exit_code == code
    assert len(str(failure).splitlines()) == len(changes) - ("ckpt_step" in changes)


def test_what_is_wrong_with_the_command_is_shown_by_the_first_rank_alone(
    corpus: TinyCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_flags, wrong_files = read_flags(corpus.flags(lr=None)), read_flags(corpus.flags(data_path="none"))
    for rank, are_alike in ((0, False), (1, True)):
        for name, value in {**TORCHRUN, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)
        assert refusal(wrong_flags).is_on_all_ranks is are_alike
        assert not refusal(wrong_files).is_on_all_ranks, "the files of another node may differ"
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    srun = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "3"}
    for name, value in srun.items():
        monkeypatch.setenv(name, value)
    for local, is_shown_by_another in (("0", False), ("1", True)):
        monkeypatch.setenv("SLURM_LOCALID", local)
        assert refusal(wrong_files).is_on_all_ranks is is_shown_by_another, "srun ends no other task of the node"
