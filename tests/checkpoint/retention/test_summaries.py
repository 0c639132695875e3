"""What is known of the checkpoints of a folder without their tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import manifest
from megatron.checkpoint.retention.summaries import ManifestSummaries, other_files, steps_in
from megatron.checkpoint.storage import Storage
from megatron.errors import DamagedError
from tests.checkpoint.retention.checkpoints import RUN, save_step


def test_a_manifest_is_parsed_once_and_sizes_are_looked_at_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    real = manifest._checked

    def counted(path: Path, *more: Any) -> Any:
        if not path.parent.name.startswith(".tmp"):  # which a save reads back
            parsed.append(path.parent.name)
        return real(path, *more)

    monkeypatch.setattr(manifest, "_checked", counted)
    summaries = ManifestSummaries(Storage())
    first, second = save_step(tmp_path, 1, loss=2.5), save_step(tmp_path, 2)
    one = summaries.of(first)
    assert (one.step, one.run_id, one.validation_loss, dict(one.layout)) == (1, RUN, 2.5, {})
    assert one.size_bytes == (first / "pieces_00000.safetensors").stat().st_size
    assert summaries.of(first) == one and summaries.of(second).step == 2
    assert parsed == ["iter_0000001", "iter_0000002"]
    save_step(tmp_path, 1, seed=9)
    assert summaries.of(first).digest != one.digest
    assert parsed[2:] == ["iter_0000001"]
    with (first / "pieces_00000.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedError, match=r"pieces_00000.safetensors has \d+ bytes; its manifest expects \d+. Use"):
        summaries.of(first)
    summaries.of(second)
    (second / "pieces_00000.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"cannot read .*iter_0000002/pieces_00000.safetensors: No such file"):
        summaries.of(second)


@pytest.mark.parametrize("value", [None, "1", True, []])
def test_a_loss_that_is_no_number_is_none(tmp_path: Path, value: Any) -> None:
    assert ManifestSummaries(Storage()).of(save_step(tmp_path, 1, loss=value)).validation_loss is None


def test_folders_are_listed_newest_first_without_links_and_others(tmp_path: Path) -> None:
    for name in ("iter_0000002", "iter_0000010", "iter_10000001", ".old-iter_0000003-ab", "iter_3", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000004").symlink_to(tmp_path / "iter_0000002")
    (tmp_path / "iter_0000005").touch()
    os.mkfifo(tmp_path / "iter_0000006")
    assert list(steps_in(tmp_path, Storage())) == [10000001, 10, 2]


def test_files_of_others_are_named(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1)
    summary = ManifestSummaries(Storage()).of(folder)
    (folder / ".nfs0000123").touch()
    assert other_files(summary, Storage()) == []
    (folder / "README").touch()
    assert other_files(summary, Storage()) == ["README"]
