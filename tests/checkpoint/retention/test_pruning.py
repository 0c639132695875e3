"""Which checkpoints are deleted after a save, and which never are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.retention.pruning import Pruner, RetentionRules
from megatron.checkpoint.retention.summaries import ManifestSummary
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.retention.checkpoints import OTHER_RUN, RUN, save_step, steps


def summary(step: int, loss: float | None = None) -> ManifestSummary:
    return ManifestSummary(Path(f"iter_{step}"), step, f"{step:064x}", (), RUN, loss, {})


def deleted(rules: RetentionRules, found: Sequence[ManifestSummary], not_counted: Sequence[int] = ()) -> list[int]:
    return [entry.step for entry in rules.expired(found, lambda entry: entry.step not in not_counted)]


FIVE = [summary(50, 3.0), summary(40), summary(30, 2.0), summary(20, 2.0), summary(10, 1.0)]


@pytest.mark.parametrize(
    ("rules", "not_counted", "expected"),
    [
        (RetentionRules(1), (), [40, 30, 20, 10]),
        (RetentionRules(3), (), [20, 10]),
        (RetentionRules(5), (), []),
        (RetentionRules(9), (), []),
        (RetentionRules(1, every=20), (), [30, 10]),
        (RetentionRules(2, every=7), (), [30, 20, 10]),
        (RetentionRules(1, best=True), (), [40, 30, 20]),
        (
            RetentionRules(1, best=True),
            (10,),
            [40, 20, 10],
        ),  # of equal losses the newer; what does not count is not best
        (RetentionRules(2), (50,), [50, 20, 10]),
        (RetentionRules(2), (50, 40, 30, 20), []),  # one that counts is not two
        (RetentionRules(1, every=10), (), []),
    ],
)
def test_the_rules_choose(rules: RetentionRules, not_counted: Sequence[int], expected: list[int]) -> None:
    assert deleted(rules, FIVE, not_counted) == expected


@given(
    found=st.dictionaries(st.integers(0, 60), st.tuples(st.none() | st.floats(0, 9), st.booleans()), max_size=12),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 20),
    best=st.booleans(),
)
def test_what_is_promised_is_never_deleted(
    found: dict[int, tuple[float | None, bool]], last: int, every: int | None, best: bool
) -> None:
    entries = [summary(step, found[step][0]) for step in sorted(found, reverse=True)]
    counting = [entry for entry in entries if found[entry.step][1]]
    not_counted = [step for step in found if not found[step][1]]
    gone = set(deleted(RetentionRules(last, every, best), entries, not_counted))
    assert len([entry for entry in counting if entry.step not in gone]) >= min(last, len(counting))
    assert not gone & {entry.step for entry in counting[:last]}
    assert not [step for step in gone if every is not None and step % every == 0]
    rated = [entry.validation_loss for entry in counting if entry.validation_loss is not None]
    if best and rated:
        assert min(rated) in [entry.validation_loss for entry in counting if entry.step not in gone]
    if len(counting) >= last:
        kept = {entry.step for entry in counting[:last]}
        limit = len(found) if every is None else sum(1 for step in found if step % every)
        assert len(gone) >= limit - len(kept) - best


def test_older_ones_go_when_the_new_one_is_committed_and_not_before(tmp_path: Path) -> None:
    retention = Pruner(RetentionRules(2, every=4), Storage())
    seen: list[list[int]] = []

    class Watching(Storage):
        def rename(self, source: Path, target: Path) -> None:
            seen.append(steps(tmp_path))
            super().rename(source, target)

    def keep(path: Path, mesh: ParallelMesh) -> None:
        retention.apply(path)

    for step in range(1, 7):
        seen.clear()
        save_step(tmp_path, step, storage=Watching(), after_commit=keep)
        before = {1: [], 2: [1], 3: [1, 2], 4: [2, 3], 5: [3, 4], 6: [4, 5]}[step]
        assert seen[0] == before  # the commit: nothing is gone yet
    assert steps(tmp_path) == [4, 5, 6]


def test_a_folder_without_validation_losses_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retention = Pruner(RetentionRules(1, best=True), Storage())
    for step in (1, 2, 3):
        retention.apply(save_step(tmp_path, step))
    assert steps(tmp_path) == [3]
    assert capsys.readouterr().err.count(f"--keep-best keeps no checkpoint in {tmp_path}: none has a validation") == 1


def test_only_certain_checkpoints_of_this_run_are_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (*range(1, 10), 19):
        save_step(tmp_path, step)
    save_step(tmp_path, 10, run_id=OTHER_RUN)
    save_step(tmp_path, 11, run_id="")  # an imported model
    elsewhere = save_step(tmp_path / "elsewhere", 12)
    (tmp_path / "iter_0000012").symlink_to(elsewhere)
    (tmp_path / "iter_0000008" / "manifest.json").write_text("{}")
    (tmp_path / "iter_0000007" / "pieces_00000.safetensors").unlink()
    (tmp_path / "iter_0000006" / "notes.txt").touch()
    (tmp_path / "iter_0000005" / ".nfs0001").touch()
    (tmp_path / "iter_0000000").touch()
    (tmp_path / "iter_0000013").mkdir()
    (tmp_path / "best").mkdir()
    newest = save_step(tmp_path, 20)
    later = save_step(tmp_path, 30)  # of a past that was left behind
    retention = Pruner(RetentionRules(2), Storage())
    gone = retention.apply(newest)
    assert [int(path.name[5:]) for path in gone] == [9, 5, 4, 3, 2, 1]
    assert later.is_dir() and elsewhere.is_dir() and (tmp_path / "best").is_dir()
    assert steps(tmp_path) == [0, 6, 7, 8, 10, 11, 12, 13, 19, 20, 30]
    retention.apply(newest)
    told = capsys.readouterr().err
    for text in (
        f"iter_0000010 belongs to another run ({OTHER_RUN}) and is not deleted",
        "iter_0000011 belongs to another run (no run id) and is not deleted",
        "iter_0000013 does not count towards --keep-last and is not deleted",
        "iter_0000008 does not count towards --keep-last and is not deleted",
        "iter_0000007 does not count towards --keep-last and is not deleted",
        "iter_0000006 is not deleted: it contains files that are not part of it (notes.txt)",
    ):
        assert told.count(text) == 1, text
    assert "iter_0000012" not in told


def test_damaged_checkpoints_do_not_let_good_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / "iter_0000003" / "pieces_00000.safetensors").write_bytes(b"")
    assert Pruner(RetentionRules(2), Storage()).apply(save_step(tmp_path, 4)) == [tmp_path / "iter_0000001"]
    assert steps(tmp_path) == [2, 3, 4]


def test_a_checkpoint_that_names_a_run_is_not_deleted_for_one_that_names_none(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2, run_id="")
    newest = save_step(tmp_path, 3, run_id="")
    assert Pruner(RetentionRules(1), Storage()).apply(newest) == [tmp_path / "iter_0000002"]


def test_steps_that_a_resumed_run_passed_over_do_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step)
    retention = Pruner(RetentionRules(2), Storage(), resumed_step=2)  # 3 and 4 would not load
    assert retention.apply(save_step(tmp_path, 3, seed=33)) == [tmp_path / "iter_0000001"]
    assert steps(tmp_path) == [2, 3, 4]
    assert retention.apply(save_step(tmp_path, 5)) == [tmp_path / "iter_0000004", tmp_path / "iter_0000002"]
    assert steps(tmp_path) == [3, 5]


def test_a_failure_is_a_warning_and_the_next_save_tries_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stubborn(Storage):
        refuses = True

        def rename(self, source: Path, target: Path) -> None:
            if self.refuses and ".trash-" in target.name:
                raise PermissionError(13, "Permission denied")
            super().rename(source, target)

    storage = Stubborn()
    retention = Pruner(RetentionRules(1), storage)
    save_step(tmp_path, 1)
    assert retention.apply(save_step(tmp_path, 2)) == []
    assert steps(tmp_path) == [1, 2]
    assert "could not delete" in capsys.readouterr().err
    storage.refuses = False
    assert len(retention.apply(save_step(tmp_path, 3))) == 2
    assert retention.apply(tmp_path / "iter_0000009") == []
    assert f"no checkpoint in {tmp_path} is deleted now: " in capsys.readouterr().err


def test_the_work_of_deleting_does_not_grow_with_the_square_of_the_checkpoints(tmp_path: Path) -> None:
    class Counting(Storage):
        asked = 0

        def names(self, path: Path) -> list[str]:
            self.asked += path == tmp_path
            return super().names(path)

    for step in range(1, 9):
        newest = save_step(tmp_path, step)
    (tmp_path / "best").symlink_to("iter_0000003")
    storage = Counting()
    assert len(Pruner(RetentionRules(1), storage).apply(newest)) == 7
    assert storage.asked == 2, "once to find them, once for their second names"
    assert steps(tmp_path) == [8] and not (tmp_path / "best").is_symlink()


def test_the_newest_whole_checkpoint_is_found_by_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    save_step(tmp_path, 3, run_id=OTHER_RUN)
    retention = Pruner(RetentionRules(1), Storage())
    assert retention.newest_in(tmp_path, RUN).step == 2
    for step in (2, 1):
        file = tmp_path / f"iter_{step:07d}" / "pieces_00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
        if step == 2:
            newest = retention.newest_in(tmp_path, RUN)
            assert newest.step == 1 and retention.plan(newest) == []
            assert "iter_0000002 does not count towards --keep-last and is not deleted" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of this run in .*, so none is deleted"):
        retention.newest_in(tmp_path, RUN)
    with pytest.raises(StorageError, match=r"cannot list .*nowhere: No such file or directory. Nothing is deleted"):
        retention.newest_in(tmp_path / "nowhere", RUN)
