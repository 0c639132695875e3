"""Runs that keep some checkpoints and copy each to a second folder, and resume from there."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from megatron.checkpoint import read_record, verify
from megatron.checkpoint.storage import Storage
from megatron.config import SavingConfig
from megatron.errors import LaunchError
from megatron.train.callbacks import retention
from tests.checkpoint.made.saved_state import MESH, save_state
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.tiny_run import TinyCorpus, losses, train, write_tiny_corpus
from tools import checkpoints


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def folders(path: Path) -> list[str]:
    """The names of a folder's checkpoints."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


@pytest.mark.parametrize("saves", mark_campaign(["--async-save", "--no-async-save"], ["--async-save"]))
def test_a_run_keeps_what_it_should_and_resumes_from_the_copies(corpus: TinyCorpus, tmp_path: Path, saves: str) -> None:
    alone = tmp_path / "alone"
    assert train(corpus.flags(folder=alone)) == (0, "")

    copies = tmp_path / "copies"
    keep = ("--keep-last", "2", "--keep-every", "4", "--keep-best", "--save-secondary", str(copies), saves)
    common = {"folder": tmp_path, "save_interval": 1}
    assert (
        train(corpus.flags(*keep, **common, exit_interval=7, eval_interval=3, tensor_model_parallel_size=2), 2)[0] == 0
    )
    saved = tmp_path / "checkpoints"
    records = [read_record(saved / f"iter_{step:07d}") for step in (4, 6, 7)]
    assert [record.get("validation_loss") is not None for record in records] == [False, True, False]
    assert folders(saved) == folders(copies) == ["iter_0000004", "iter_0000006", "iter_0000007"]
    for path in (saved / "iter_0000007").iterdir():
        assert (copies / "iter_0000007" / path.name).read_bytes() == path.read_bytes()

    shutil.rmtree(saved)  # a disk of the node is gone
    code, text = train(corpus.flags(*keep, **common))
    assert (code, text) == (0, "")
    assert folders(saved) == ["iter_0000008"]
    assert folders(copies) == ["iter_0000004", "iter_0000006", "iter_0000007", "iter_0000008"]
    assert losses(tmp_path)[8] == pytest.approx(losses(alone)[8], rel=1e-5)


def test_a_run_resumed_from_the_copies_is_equal_to_the_last_bit(corpus: TinyCorpus, tmp_path: Path) -> None:
    assert train(corpus.flags(folder=tmp_path / "alone")) == (0, "")
    keep = ("--keep-last", "1", "--save-secondary", str(tmp_path / "copies"), "--checkpoint-link", "e{epoch}-s{step}")
    assert train(corpus.flags(*keep, folder=tmp_path, save_interval=2, exit_interval=6)) == (0, "")
    (link,) = (tmp_path / "checkpoints").glob("e*-s*")
    assert link.name == "e0-s6" and link.readlink() == Path("iter_0000006")  # those of deleted ones are gone
    shutil.rmtree(tmp_path / "checkpoints")
    assert train(corpus.flags(*keep, folder=tmp_path, save_interval=2)) == (0, "")
    assert losses(tmp_path) == losses(tmp_path / "alone")
    ends = [
        {file.name: file.read_bytes() for file in path.glob("iter_0000008/pieces_*")}
        for path in (tmp_path / "alone" / "checkpoints", tmp_path / "checkpoints", tmp_path / "copies")
    ]
    assert ends[0] == ends[1] == ends[2] != {}


class StoppedStorage(Storage):
    """Waits in the first file that is written until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def sync(self, handle: int) -> None:
        self.reached.set()
        assert self.go_on.wait(120)
        super().sync(handle)


def test_tools_leave_a_copy_alone_that_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would remove its temporary folder, as that of a save that died."""
    source, copies, storage = save_state(tmp_path / "run", 4), tmp_path / "copies", StoppedStorage()
    save_state(copies, 2)
    monkeypatch.setattr(retention, "DISK", storage)
    made = retention.Retention(SavingConfig(save_secondary=str(copies)), lambda: None)
    copying = threading.Thread(target=made.after_save, args=(source, MESH))
    copying.start()
    try:
        assert storage.reached.wait(120)
        for words in (["copy", str(source), str(copies)], ["prune", str(copies), "--keep-last", "1"]):
            with pytest.raises(LaunchError, match="copies is in use by run"):
                checkpoints.main(words)
    finally:
        storage.go_on.set()
        copying.join()
    assert folders(copies) == ["iter_0000002", "iter_0000004"]
    with checkpoints._locked(copies, ""):  # and the other way round
        made.after_save(save_state(tmp_path / "run", 6), MESH)
    said = capsys.readouterr().err
    assert f"iter_0000006 was not copied to --save-secondary {copies}: {copies} is in use by run" in said
    made.after_save(save_state(tmp_path / "run", 8), MESH)
    assert folders(copies) == ["iter_0000002", "iter_0000004", "iter_0000008"]


def test_a_run_whose_folder_is_lost_continues_from_what_its_nodes_hold(corpus: TinyCorpus, tmp_path: Path) -> None:
    saved, copies = tmp_path / "checkpoints", tmp_path / "local"
    short = {"train_iters": 4, "save_interval": 1, "lr_warmup_fraction": None}
    words = ("--save-secondary", str(copies), "--save-secondary-per-node", "--load", str(saved))
    assert train(corpus.flags(*words, folder=tmp_path, **short)) == (0, "")
    assert folders(copies) == ["iter_0000003", "iter_0000004"] and (copies / "run.json").exists()
    for damaged in (False, True):
        if damaged:
            for path in saved.glob("iter_*/manifest.json"):
                path.write_text("{}")
        else:
            shutil.rmtree(saved)
        assert train(corpus.flags(*words, folder=tmp_path, **short)) == (0, "")
        assert damaged or folders(saved) == ["iter_0000004"]
        assert verify(saved / "iter_0000004").step == 4
