"""Runs that go back to an earlier step or move to another folder, and are started again by the same command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import save
from megatron.config import LoadingConfig
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.train.restarts.restore import Start, find_start
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.records import make_record
from tests.train.samples import run_config
from tools import checkpoints

MESH = ParallelMesh.single()
ONE = "1" * 16


def saved(folder: Path, step: int, **changes: Any) -> Path:
    """A folder with a checkpoint of that step."""
    save(folder, step, whole_sink(make_state(seed=step)).expected, make_record(step, **changes).to_json(), MESH)
    return folder


def started(folder: Path, **changes: Any) -> Start:
    """A start with --save `folder`."""
    return find_start(run_config(save=str(folder), save_interval=1, **changes), MESH)


def test_a_run_that_goes_back_is_a_run_of_its_own_and_continues_when_it_is_started_again(tmp_path: Path) -> None:
    run, copies = saved(tmp_path / "a", 4, run_id=ONE), saved(tmp_path / "copies", 6, run_id=ONE)
    saved(run, 6, run_id=ONE)
    flags = {"load": str(run), "ckpt_step": 4}
    with pytest.raises(
        CheckpointError, match=rf"copies has checkpoints of run {ONE} .*forked from run {ONE} at iterat"
    ):
        started(tmp_path / "b", **flags, save_secondary=str(copies))
    first = started(tmp_path / "b", **flags, save_secondary=str(tmp_path / "more"))
    assert first.identity.run_id != ONE and first.identity.forked_from["step"] == 4
    assert first.saved is not None and first.saved.record.progress.step == 4
    assert started(tmp_path / "b", load=str(run / "iter_0000004")).identity == first.identity, "nothing is saved yet"
    saved(tmp_path / "b", 5, run_id=first.identity.run_id, forked_from=first.identity.forked_from)
    for more in (flags, {"load": str(run / "iter_0000004")}):
        again = started(tmp_path / "b", **more)
        assert again.identity == first.identity and again.config.loading == LoadingConfig(load=str(tmp_path / "b"))
        assert again.saved is not None and again.saved.record.progress.step == 5
    with pytest.raises(CheckpointError, match=rf"this is a fork of run {ONE} at iteration 6 .*without --ckpt-step"):
        started(tmp_path / "b", load=str(run), ckpt_step=6)


def test_copies_of_later_steps_are_not_beside_a_run_that_goes_back(tmp_path: Path) -> None:
    run, copies = saved(tmp_path / "a", 4, run_id=ONE), saved(tmp_path / "copies", 6, run_id=ONE)
    sentence = r"copies has a copy of iteration 6, which the next run .* goes back to iteration 4\. Use another"
    for load in ({"load": str(run), "ckpt_step": 4}, {"load": str(run / "iter_0000004")}):
        with pytest.raises(CheckpointError, match=sentence):
            started(run, **load, save_secondary=str(copies))


@pytest.mark.parametrize("per_node", [False, True])
def test_deleting_later_checkpoints_goes_back_only_without_their_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], per_node: bool
) -> None:
    run, copies = saved(saved(tmp_path / "a", 4, run_id=ONE), 6, run_id=ONE), saved(tmp_path / "copies", 6, run_id=ONE)
    flags = {"save_secondary": str(copies), "save_secondary_per_node": per_node}
    shutil.rmtree(run / "iter_0000006")
    start = started(run, load=str(run), **flags)
    assert start.saved is not None and start.saved.record.progress.step == 6
    told = capsys.readouterr().err
    assert f"--load {run} h" in told and "If later ones were deleted there to go back" in told
    for folder in (run, copies):
        shutil.rmtree(folder / "iter_0000006", ignore_errors=True)
    start = started(run, load=str(run), **flags)
    assert start.saved is not None and start.saved.record.progress.step == 4
    assert "deleted there" not in capsys.readouterr().err


def test_a_copy_of_an_older_step_is_of_the_same_run_until_it_is_named(tmp_path: Path) -> None:
    run = saved(saved(tmp_path / "a", 4, run_id=ONE), 6, run_id=ONE)
    assert checkpoints.main(["copy", str(run), str(tmp_path / "b"), "--step", "4"]) == 0
    copy = started(tmp_path / "b", load=str(tmp_path / "b"))
    assert copy.saved is not None and copy.saved.record.progress.step == 4 and copy.identity.run_id == ONE
    again = started(tmp_path / "b", load=str(tmp_path / "b"), save_secondary=str(run))
    assert again.saved is not None and again.saved.record.progress.step == 6, "the later steps of the same run"
    branch = started(tmp_path / "c", load=str(tmp_path / "b" / "iter_0000004"))
    assert branch.identity.run_id != ONE and branch.identity.forked_from["run_id"] == ONE


def test_a_checkpoint_is_not_named_in_vain_while_later_ones_lie_where_the_run_saves(tmp_path: Path) -> None:
    run = saved(saved(tmp_path / "a", 4, run_id=ONE), 6, run_id=ONE)
    with pytest.raises(
        CheckpointError, match=r"iter_0000004 is older than the checkpoint of step 6 in --save .*a, from whic"
    ):
        started(run, load=str(run / "iter_0000004"))
    assert started(run, load=str(run / "iter_0000006")).saved is not None


def test_a_run_that_has_moved_continues_where_it_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "a", 4, run_id=ONE)
    assert started(tmp_path / "b", load=str(tmp_path / "a")).config.loading.load == str(tmp_path / "a")
    saved(tmp_path / "b", 6, run_id=ONE)
    capsys.readouterr()
    start = started(tmp_path / "b", load=str(tmp_path / "a"))
    assert start.saved is not None and start.saved.record.progress.step == 6
    assert f"resumes from --save {tmp_path / 'b'}, not from --load {tmp_path / 'a'}" in capsys.readouterr().err
    saved(tmp_path / "a", 8, run_id=ONE)
    start = started(tmp_path / "b", load=str(tmp_path / "a"))
    assert start.saved is not None and start.saved.record.progress.step == 8


def test_a_run_from_scratch_continues_when_it_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copies = saved(tmp_path / "a", 9, run_id=ONE), saved(tmp_path / "copies", 9, run_id=ONE)
    flags = {"load": str(run), "from_scratch": True, "save_secondary": str(copies)}
    first = started(run, **flags)
    assert first.saved is None and first.identity.run_id != ONE and "started with --from-scratch" in str(first.identity)
    again = started(run, **flags)
    assert again.saved is None and again.identity == first.identity, "nothing is saved yet"
    for place in (copies, run):  # --save has lost it; then both have it
        saved(place, 5, run_id=first.identity.run_id, forked_from=first.identity.forked_from)
        capsys.readouterr()
        again = started(run if place == run else tmp_path / "lost", **flags)
        assert again.identity == first.identity and not again.config.loading.from_scratch
        assert again.saved is not None and again.saved.found.path == place / "iter_0000005"
        told = capsys.readouterr().err
        assert "not at iteration 0 (--from-scratch). To start over, use another --save." in told
    anew = started(tmp_path / "b", load=str(run), from_scratch=True)
    assert anew.saved is None and anew.identity.run_id != first.identity.run_id
    saved(run, 12, run_id=ONE)
    (run / "iter_0000012" / "manifest.json").write_text("{}")  # whose it is cannot be seen
    again = started(run, **flags)
    assert again.saved is not None and again.saved.record.progress.step == 5
    (run / "run.json").unlink()
    with pytest.raises(CheckpointError, match=rf"a has checkpoints of several runs .* run {first.identity.run_id}"):
        started(run, **flags)
    shutil.rmtree(run / "iter_0000009")
    again = started(run, **flags)
    assert again.saved is not None and again.identity == first.identity, "its checkpoints say how it began"


def test_a_run_for_which_there_was_nothing_to_load_continues_where_it_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"load": str(tmp_path / "empty")}
    first = started(tmp_path / "b", **flags)
    assert first.saved is None and started(tmp_path / "b", **flags).identity == first.identity
    assert capsys.readouterr().err.count("empty does not exist (nearest") == 2
    saved(tmp_path / "b", 5, run_id=first.identity.run_id, forked_from=first.identity.forked_from)
    again = started(tmp_path / "b", **flags)
    assert again.saved is not None and again.identity == first.identity
    told = capsys.readouterr().err
    assert f"resumes from --save {tmp_path / 'b'}, not from --load {tmp_path / 'empty'}" in told
    assert "does not exist" not in told
    copies = saved(tmp_path / "copies", 5, run_id=first.identity.run_id, forked_from=first.identity.forked_from)
    again = started(tmp_path / "b", **flags, save_secondary=str(copies))
    assert again.saved is not None and again.saved.found.path.parent == tmp_path / "b", "not a copy of what is there"
    assert "resuming from the copy" not in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"b already has checkpoints \(newest: iteration 5\), but --load .* none"):
        started(tmp_path / "b", load=str(tmp_path / "other"))
    plain = started(tmp_path / "b", load=str(tmp_path / "b"))
    assert plain.saved is not None and plain.identity == first.identity
    assert started(tmp_path / "b", from_scratch=True).identity != first.identity
    assert not started(tmp_path / "c", finetune=True).identity.forked_from, "no folder is named that could hold one"


def test_a_run_without_a_folder_does_not_begin_anew_while_its_copies_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")

    def refused(*words: object, **named: object) -> None:
        raise PermissionError(13, "access denied")

    for name in ("ls", "info"):
        monkeypatch.setattr(fsspec.filesystem("memory"), name, refused)
    for flags in ({"load": "memory://b/run"}, {"load": str(tmp_path / "gone"), "save_secondary": "memory://b/run"}):
        with pytest.raises(StorageError, match=r"cannot (read|list) memory:/b/run"):
            started(tmp_path / "gone", **flags)
