"""Which checkpoint of a directory is taken, and when none may be."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import (
    DamagedError,
    LoadedCheckpoint,
    SaveOptions,
    find,
    load,
    load_newest,
    manifest,
    newest_record,
    save,
    saving,
    verify,
)
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.pieces import Kind, PieceKey
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state, whole_sink
from tests.checkpoint.made.saved_state import MESH, RECORD, save_state


def test_an_empty_directory_gives_none_and_an_unknown_format_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(tmp_path / "absent") == []
    assert load_newest(tmp_path / "absent", list, MESH) is None
    assert load_newest(tmp_path, list, MESH) is None
    (tmp_path / ".tmp-iter_0000005-aa").mkdir()
    (tmp_path / ".run.lock").touch()
    (tmp_path / "config.json").touch()
    assert load_newest(tmp_path, list, MESH) is None
    assert "interrupted first save" in capsys.readouterr().err


def test_without_a_check_checkpoints_of_another_run_than_the_folders_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = "1" * 16, "2" * 16
    pieces = cut_for_ranks(make_state(), 1, 0)[0]
    paths = [save(tmp_path, step, pieces, {"run_id": run}, MESH) for step, run in ((3, own), (6, other))]
    for content, newest in (("", 1), (f'{{"run_id": "{own}"}}', 0), (f'{{"run_id": "{other}"}}', 1), ("[]", 1)):
        (tmp_path / "run.json").write_text(content)
        found = newest_record(tmp_path, MESH)
        assert found is not None and found.path == paths[newest]
        assert (f"it belongs to run {other}, but {tmp_path} to run {own}" in capsys.readouterr().err) is (newest == 0)
    named = newest_record(paths[1], MESH)
    assert named is not None and named.path == paths[1]


@pytest.mark.parametrize(
    "name",
    [
        *("global_step100", "latest", "layer_01-model_00-model_states.pt", "model.safetensors", ".metadata", "release"),
        *("mp_rank_00", "zero_pp_rank_0_mp_rank_00_optim_states", "step-1200", "pytorch_model.bin"),
    ],
)
def test_a_foreign_checkpoint_is_not_treated_as_a_new_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"has no checkpoint of this program, but .*{name}"):
        load_newest(tmp_path, list, MESH)


def test_a_megatron_folder_of_the_same_name_is_not_mistaken(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"none of the 1 (.|\n)*iter_0000100 has no manifest.json"):
        load_newest(tmp_path, list, MESH)


def test_the_newest_valid_checkpoint_is_used_regardless_of_the_latest_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 10_000_001):
        save_state(tmp_path, step, seed=step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert [candidate.step for candidate in find(tmp_path)] == [10_000_001, 2, 1]
    sink = whole_sink(make_state(seed=10_000_001))
    found = load_newest(tmp_path, sink.wanted, MESH)
    assert found == LoadedCheckpoint(RECORD, tmp_path / "iter_10000001")
    sink.check()
    output = capsys.readouterr()
    assert "('2'): the newest valid" in output.err
    assert f"successfully loaded checkpoint from {tmp_path} at iteration 10000001" in output.out


def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_state(tmp_path, 1, seed=1)
    path = save_state(tmp_path, 2, seed=2)
    content = bytearray((path / "pieces_00000.safetensors").read_bytes())
    content[-5] ^= 1
    (path / "pieces_00000.safetensors").write_bytes(content)
    sink = whole_sink(make_state(seed=1))
    assert load_newest(tmp_path, sink.wanted, MESH) == LoadedCheckpoint(RECORD, tmp_path / "iter_0000001")
    sink.check()
    text = capsys.readouterr().err
    assert f"skipping checkpoint {path}" in text
    assert "is damaged between bytes" in text
    assert "older than 1 skipped" in text
    with pytest.raises(DamagedError, match=r"pieces_00000.safetensors is damaged between bytes \d+ and \d+"):
        verify(path)
    assert newest_record(tmp_path, MESH) == LoadedCheckpoint(RECORD, path)  # sizes are right: only a load can tell


def test_what_was_passed_over_before_is_passed_over_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save_state(tmp_path, step, seed=1)
    (tmp_path / "iter_0000002" / "manifest.json").write_text("{}")
    found = newest_record(tmp_path, MESH)
    assert found is not None and found.path.name == "iter_0000001"
    assert capsys.readouterr().err.count("skipping checkpoint") == 1
    assert load_newest(tmp_path, whole_sink(make_state(seed=1)).wanted, MESH, known=found) == found
    assert capsys.readouterr().err == ""


def test_if_all_are_damaged_the_error_names_each(tmp_path: Path) -> None:
    for step in (1, 2):
        (save_state(tmp_path, step) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of the 2 (.|\n)*iter_0000002(.|\n)*iter_0000001"):
        load_newest(tmp_path, list, MESH)
    with pytest.raises(CheckpointError, match="none of the 2"):
        newest_record(tmp_path, MESH)


def test_a_mismatching_checkpoint_is_not_treated_as_damaged(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    save_state(tmp_path, 2)
    key = PieceKey("scale", "master", (5,), (0,), (5,), 0, 5)
    with pytest.raises(CheckpointError, match=r"tensor scale has shape \[\] in the checkpoint"):
        load_newest(tmp_path, lambda: [(key, lambda _: None)], MESH)


def test_missing_permissions_are_not_treated_as_damage(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    save_state(tmp_path, 2)

    class Forbidden(Storage):
        def open_to_read(self, path: Path) -> tuple[int, int]:
            raise PermissionError(13, "Permission denied")

    with pytest.raises(StorageError, match=r"cannot read .*iter_0000002/manifest.json: Permission denied \(EACCES\)"):
        load_newest(tmp_path, list, MESH, storage=Forbidden())


def test_a_resume_lists_the_directory_and_parses_the_manifest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    parsed: list[Path] = []
    real = manifest._checked
    monkeypatch.setattr(manifest, "_checked", lambda path, *more: (parsed.append(path.parent), real(path, *more))[1])
    found = newest_record(tmp_path, MESH)
    assert found is not None and found.manifest is not None
    assert load_newest(tmp_path, whole_sink(make_state()).wanted, MESH, known=found) == found
    assert parsed == [path]


def test_a_found_checkpoint_may_disappear(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    found = newest_record(tmp_path, MESH)
    shutil.rmtree(path)
    sink = whole_sink(make_state())
    assert load_newest(tmp_path, sink.wanted, MESH, known=found) == LoadedCheckpoint(RECORD, tmp_path / "iter_0000001")
    sink.check()


def test_symbolic_links_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_state(tmp_path / "run", 1, seed=1)
    elsewhere = save_state(tmp_path / "elsewhere", 5, seed=5)
    (tmp_path / "run" / "iter_0000005").symlink_to(elsewhere)
    (tmp_path / "run" / "iter_0000007").symlink_to(tmp_path / "nowhere")
    assert [candidate.step for candidate in find(tmp_path / "run")] == [1]
    text = capsys.readouterr().err
    assert "has symbolic links (iter_0000005, iter_0000007), which are not followed" in text
    sink = whole_sink(make_state(seed=1))
    assert load_newest(tmp_path / "run", sink.wanted, MESH) == LoadedCheckpoint(
        RECORD, tmp_path / "run" / "iter_0000001"
    )
    sink.check()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "iter_0000005").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"no checkpoint, only symbolic links \(iter_0000005\).* Use the target"):
        find(tmp_path / "links")
    found = newest_record(tmp_path / "links" / "iter_0000005", MESH)  # named by the user
    assert found is not None and found.record == RECORD


@pytest.mark.parametrize("kind", ["fifo", "directory", "large", "bytes"])
def test_a_hostile_hint_is_ignored(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_state(tmp_path, 2, seed=2)
    hint = tmp_path / "latest_checkpointed_iteration.txt"
    hint.unlink()
    if kind == "fifo":
        os.mkfifo(hint)
    elif kind == "directory":
        hint.mkdir()
    elif kind == "large":
        hint.touch()
        os.truncate(hint, 2**40)
    else:
        hint.write_bytes(b"\xff\x1b]0;owned\x07\n7")
    sink = whole_sink(make_state(seed=2))
    assert load_newest(tmp_path, sink.wanted, MESH) == LoadedCheckpoint(RECORD, tmp_path / "iter_0000002")
    text = capsys.readouterr().err
    assert "\x1b" not in text
    assert ("ignoring " in text) is (kind in ("large", "bytes"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq"])
def test_a_checkpoint_with_values_that_are_not_finite_is_passed_over(
    tmp_path: Path, kind: Kind, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    save_state(tmp_path, 1, seed=1)
    state = make_state(seed=2)
    state["decoder.layers.0.mlp.linear_fc2.weight", kind][3, 7] = value
    options = SaveOptions(chunk_bytes=256, check_finite=False)
    path = save(tmp_path, 2, cut_for_ranks(state, 1, 2)[0], RECORD, MESH, options)
    touched: list[torch.Tensor] = []
    with pytest.raises(
        DamagedError,
        match=r"pieces_00000.safetensors has a value that is not finite at byte \d+, in tensor "
        rf"decoder.layers.0.mlp.linear_fc2.weight \({kind}\): the run that saved it had diverged",
    ):
        load(path, [(key, touched.append) for key, _ in whole_sink(state).expected], MESH)
    assert not touched
    sink = whole_sink(make_state(seed=1))
    assert load_newest(tmp_path, sink.wanted, MESH) == LoadedCheckpoint(RECORD, tmp_path / "iter_0000001")
    sink.check()
    assert f"skipping checkpoint {path}: " in capsys.readouterr().err
    assert verify(path).step == 2  # its bytes are those that were written


def test_a_checkpoint_with_missing_pieces_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_state(tmp_path, 1, seed=1)
    pieces = cut_for_ranks(make_state(seed=2), 1, 2)[0]
    lost = next(number for number, (key, _) in enumerate(pieces) if key.numel < math.prod(key.shape))
    monkey = pytest.MonkeyPatch()
    monkey.setattr(saving, "check_complete", list)
    monkey.setattr(saving, "_read_back", lambda *_: None)
    path = save(tmp_path, 2, [*pieces[:lost], *pieces[lost + 1 :]], RECORD, MESH)
    monkey.undo()
    with pytest.raises(DamagedError, match=r"iter_0000002/manifest.json is incomplete: tensor .* Use another"):
        verify(path)
    sink = whole_sink(make_state(seed=1))
    assert load_newest(tmp_path, sink.wanted, MESH) == LoadedCheckpoint(RECORD, tmp_path / "iter_0000001")
    sink.check()
    assert "is incomplete: tensor" in capsys.readouterr().err


def test_names_of_foreign_files_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "model\x1b]0;owned\x07\n.pt").touch()
    with pytest.raises(CheckpointError, match=r"look like another's: 'model\\x1b\]0;owned\\x07\\n\.pt'\. Convert"):
        find(tmp_path)
