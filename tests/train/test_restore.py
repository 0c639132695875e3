"""Which checkpoint a run resumes from, and when it refuses to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint import Found, save
from megatron.checkpoint.record import Progress, Record
from megatron.engine.update_gate import UpdateGate
from megatron.errors import CheckpointError
from megatron.parallel.mesh import ParallelMesh
from megatron.train import restore
from megatron.train.restore import SavedRun, check_tokenizer, find_saved_run, load_tensors
from tests.checkpoint.fake_pieces import make_state, whole_sink
from tests.checkpoint.records import make_record
from tests.train.samples import control_config

MESH = ParallelMesh.single()
RECORD = make_record()


def saved(folder: Path, step: int = 4, **changes: Any) -> Path:
    """A checkpoint of that step."""
    save(folder, step, whole_sink(make_state()).expected, make_record(step, **changes).to_json(), MESH)
    return folder


def saved_run(record: Record = RECORD) -> SavedRun:
    """The saved run found for a given record."""
    return SavedRun(record, Found(record.to_json(), Path("c")))


def test_from_scratch_ignores_checkpoints(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c")
    control = control_config(load=str(folder), save=str(folder), save_interval=1, from_scratch=True)
    assert find_saved_run(control, MESH) is None


def test_a_run_without_folders_is_a_new_run() -> None:
    assert find_saved_run(control_config(), MESH) is None


def test_the_newest_record_is_found(tmp_path: Path) -> None:
    saved(tmp_path / "c", 4)
    saved(tmp_path / "c", 6)
    found = find_saved_run(control_config(load=str(tmp_path / "c")), MESH)
    assert found is not None
    assert found.record == make_record(6)


def test_the_checkpoint_of_one_step_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", 4)
    saved(folder, 6)
    found = find_saved_run(control_config(load=str(folder), ckpt_step=4), MESH)
    assert found is not None and found.record == make_record(4)
    found = find_saved_run(control_config(load=str(folder), load_tag="global_step6"), MESH)
    assert found is not None and found.record == make_record(6)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 5 .*It holds these steps: 6, 4\."):
        find_saved_run(control_config(load=str(folder), ckpt_step=5), MESH)


def test_a_run_from_an_older_step_saves_elsewhere(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", 4)
    saved(folder, 6)
    both = {"load": str(folder), "save": str(folder), "save_interval": 1}
    with pytest.raises(CheckpointError, match=r"--ckpt-step 4 is older than the checkpoint of step 6 in --save"):
        find_saved_run(control_config(**both, ckpt_step=4), MESH)
    assert find_saved_run(control_config(**both, ckpt_step=6), MESH) is not None
    elsewhere = {**both, "save": str(tmp_path / "other")}
    assert find_saved_run(control_config(**elsewhere, ckpt_step=4), MESH) is not None


def test_a_missing_checkpoint_starts_a_new_run_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_saved_run(control_config(load=str(tmp_path / "none")), MESH) is None
    assert f"Unable to find latest file at {tmp_path / 'none' / 'latest'}" in capsys.readouterr().err


def test_a_missing_checkpoint_can_be_an_error(tmp_path: Path) -> None:
    control = control_config(load=str(tmp_path), exit_on_missing_checkpoint=True)
    with pytest.raises(CheckpointError, match=f"--load {tmp_path} holds no checkpoint and --exit-on-missing"):
        find_saved_run(control, MESH)


def test_saving_over_another_run_is_rejected(tmp_path: Path) -> None:
    control = control_config(save=str(saved(tmp_path / "c", 6)), save_interval=1)
    sentence = rf"--save {tmp_path}/c holds checkpoints already \(newest: iteration 6\).*--load {tmp_path}/c.*--from"
    with pytest.raises(CheckpointError, match=sentence):
        find_saved_run(control, MESH)


def test_saving_to_an_empty_or_absent_folder_is_a_new_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert find_saved_run(control_config(save=str(folder), save_interval=1), MESH) is None


def test_the_same_tokenizer_passes() -> None:
    check_tokenizer(control_config(load="c"), RECORD, SimpleNamespace(fingerprint="a" * 64, vocab_size=600))


def test_another_tokenizer_is_refused_with_both() -> None:
    sentence = (
        r"checkpoint in c was trained with another tokenizer \(GPT2BPE, fingerprint aaaaaaaaaaaa, 600 tokens\) than "
        r"this run's \(other, bbbbbbbbbbbb, 601 tokens\).*--merge-file"
    )
    with pytest.raises(CheckpointError, match=sentence):
        check_tokenizer(
            control_config(load="c"), RECORD, SimpleNamespace(name="other", fingerprint="b" * 64, vocab_size=601)
        )


class FakeEngine:
    """An engine that only remembers what was restored."""

    def __init__(self) -> None:
        self.mesh = MESH
        self.asked: list[bool] = []
        self.updates: list[int | None] = []
        self.loss_scales: list[Mapping[str, float]] = []
        self.gate = UpdateGate(MESH, spike_deviations=6.0, allows_overflow=False)

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        self.loss_scales.append(state)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def wanted(engine: FakeEngine, *, with_optimizer: bool) -> Any:
        engine.asked.append(with_optimizer)
        return whole_sink(make_state(kinds=("master",))).wanted()

    monkeypatch.setattr(restore, "wanted_pieces", wanted)
    monkeypatch.setattr(restore, "refresh_weights", lambda engine, updates: engine.updates.append(updates))
    return fake


def test_without_a_record_training_starts_at_zero(engine: FakeEngine) -> None:
    assert load_tensors(control_config(), engine, None) == (None, Progress())
    assert engine.asked == []


def test_a_resume_restores_everything(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, progress = load_tensors(control_config(load=str(saved(tmp_path / "c"))), engine, saved_run())
    assert record == RECORD
    assert progress == Progress(4, 32, 320)
    assert (engine.asked, engine.updates, engine.loss_scales) == ([True], [4], [{"cur_scale": 8.0}])
    assert "iteration 4, 32 samples, 320 tokens consumed" in capsys.readouterr().err


def test_finetuning_takes_only_the_weights(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = control_config(load=str(saved(tmp_path / "c")), finetune=True)
    record, progress = load_tensors(control, engine, saved_run())
    assert record == RECORD
    assert progress == Progress()
    assert (engine.asked, engine.updates, engine.loss_scales) == ([False], [None], [])
    assert "finetuning the weights" in capsys.readouterr().err


def test_training_continues_without_optimizer_state(engine: FakeEngine, tmp_path: Path) -> None:
    control = control_config(load=str(saved(tmp_path / "c")), no_load_optim=True)
    _, progress = load_tensors(control, engine, saved_run())
    assert progress.step == 4
    assert (engine.asked, engine.updates, engine.loss_scales) == ([False], [None], [])


def test_a_checkpoint_without_optimizer_state_is_rejected(engine: FakeEngine) -> None:
    record = make_record(config={"control": {"no_save_optim": True}})
    with pytest.raises(CheckpointError, match=r"in c was saved with --no-save-optim .*--no-load-optim .*--finetune"):
        load_tensors(control_config(load="c"), engine, saved_run(record))
    assert engine.asked == []


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim"])
def test_the_weights_of_a_checkpoint_without_optimizer_state_are_usable(
    engine: FakeEngine, tmp_path: Path, flag: str
) -> None:
    record = make_record(config={"control": {"no_save_optim": True}})
    control = control_config(load=str(saved(tmp_path / "c", config=record.config)), **{flag: True})
    assert load_tensors(control, engine, saved_run(record))[0] == record


def test_a_checkpoint_that_disappears_is_an_error(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"the checkpoint in {tmp_path} disappeared while it was being loaded"):
        load_tensors(control_config(load=str(tmp_path)), engine, saved_run())


def test_the_reported_progress_is_that_of_the_fallback_checkpoint(engine: FakeEngine, tmp_path: Path) -> None:
    """The record that was looked at first may belong to a checkpoint whose tensors turn out to be damaged."""
    folder = saved(tmp_path / "c", 4)
    saved(folder, 6)
    damage(folder / "iter_0000006")
    record, progress = load_tensors(control_config(load=str(folder)), engine, saved_run(make_record(6)))
    assert progress.step == 4
    assert record == RECORD


def damage(folder: Path, change: Callable[[bytes], bytes] = lambda tail: bytes(b ^ 255 for b in tail)) -> None:
    """Changes the last bytes of every tensor file, keeping its size."""
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-8] + change(content[-8:]))
