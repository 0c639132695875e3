"""Which checkpoint a run resumes from, and when it refuses to."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import LoadedCheckpoint, save
from megatron.checkpoint.record import Progress, Record
from megatron.config import LoadingConfig
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.errors import CheckpointError, ConfigError
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import TokenizerRecord
from megatron.train.restarts import restore
from megatron.train.restarts.identity import RunIdentity, read_identity, write_identity
from megatron.train.restarts.restore import SavedRun, Start, check_tokenizer, find_saved_run, find_start, load_tensors
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.records import make_record
from tests.train.samples import run_config

MESH = ParallelMesh.single()
RECORD = make_record()
ONE, TWO = "1" * 16, "2" * 16


def saved(folder: Path, step: int = 4, **changes: Any) -> Path:
    """A checkpoint of that step."""
    save(folder, step, whole_sink(make_state()).expected, make_record(step, **changes).to_json(), MESH)
    return folder


def saved_run(record: Record = RECORD) -> SavedRun:
    """The saved run found for a given record."""
    return SavedRun(record, LoadedCheckpoint(record.to_json(), Path("c")))


def test_the_checkpoint_of_one_step_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", 4)
    saved(folder, 6)
    found = find_saved_run(run_config(load=str(folder), ckpt_step=4), MESH)
    assert found is not None and found.record == make_record(4)
    found = find_saved_run(run_config(load=str(folder), load_tag="global_step6"), MESH)
    assert found is not None and found.record == make_record(6)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 5 .*It has these steps: 6, 4\."):
        find_saved_run(run_config(load=str(folder), ckpt_step=5), MESH)


def test_a_missing_checkpoint_starts_a_new_run_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "absent" / "checkpoints"
    for load, more in (("absent/checkpoints", {}), (str(folder), {"save": "elsewhere", "save_interval": 1})):
        assert find_start(run_config(load=load, **more), MESH).saved is None
        said = capsys.readouterr().err
        assert said.startswith(f"warning: --load {load}: the folder {folder} does not exist (nearest existing folder: ")
        assert f": {tmp_path}). The run starts at iteration 0 (Unable to find latest file at {folder}/latest)" in said
        assert "--exit-on-missing-checkpoint makes this an error" in said
    folder.mkdir(parents=True)
    assert find_start(run_config(load=str(folder)), MESH).saved is None
    assert f"{folder} exists but has no checkpoint" in capsys.readouterr().err
    assert find_start(run_config(load=str(folder), save="absent/checkpoints", save_interval=1), MESH).saved is None
    said = capsys.readouterr().err  # the first start of a run that is to be resumed by the same command
    assert said.startswith(f"no checkpoint in {folder} yet: starting at iteration 0") and "warning" not in said


def test_a_missing_checkpoint_can_be_an_error(tmp_path: Path) -> None:
    config = run_config(load=str(tmp_path), exit_on_missing_checkpoint=True)
    with pytest.raises(CheckpointError, match=f"--load {tmp_path} has no checkpoint, but --exit-on-missing"):
        find_saved_run(config, MESH)


def test_saving_over_another_run_is_rejected(tmp_path: Path) -> None:
    config = run_config(save=str(saved(tmp_path / "c", 6)), save_interval=1)
    sentence = rf"--save {tmp_path}/c already has checkpoints \(newest: iteration 6\).*--load {tmp_path}/c.*--from"
    with pytest.raises(CheckpointError, match=sentence):
        find_saved_run(config, MESH)


def test_another_tokenizer_is_refused_with_both() -> None:
    sentence = (
        r"checkpoint in c was trained with another tokenizer \(GPT2BPE, fingerprint aaaaaaaaaaaa, 600 tokens\) than "
        r"this run's \(other, bbbbbbbbbbbb, 601 tokens\).*--merge-file"
    )
    with pytest.raises(CheckpointError, match=sentence):
        check_tokenizer(LoadingConfig(load="c"), RECORD, TokenizerRecord("other", "b" * 64, 601))


class FakeEngine:
    """An engine that only remembers what was restored."""

    def __init__(self) -> None:
        self.mesh = MESH
        self.asked: list[bool] = []
        self.begun_with_means: list[bool] = []
        self.updates: list[int | None] = []
        self.weights: list[float] = []
        self.averages: object = None
        self.view = self
        self.restarted: list[bool] = []
        self.loss_scales: list[Mapping[str, float]] = []
        self.gate = UpdateGate(MESH, spike_deviations=6.0, allows_overflow=False)

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        self.loss_scales.append(state)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def wanted(engine: FakeEngine, *, with_optimizer: bool, starts_from_averages: bool) -> Any:
        engine.asked.append(with_optimizer)
        engine.begun_with_means.append(starts_from_averages)
        return whole_sink(make_state(kinds=("master",))).wanted()

    monkeypatch.setattr(restore, "pieces_to_load", wanted)

    def refresh(engine: FakeEngine, updates: int | None, *, averaging_weight: float, restarts_averages: bool) -> None:
        engine.updates.append(updates)
        engine.weights.append(averaging_weight)
        engine.restarted.append(restarts_averages)

    monkeypatch.setattr(restore, "refresh_weights", refresh)
    return fake


def test_a_resume_restores_everything(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, progress = load_tensors(run_config(load=str(saved(tmp_path / "c"))), engine, saved_run())
    assert record == RECORD
    assert progress == Progress(4, 32, 320)
    assert (engine.asked, engine.updates, engine.loss_scales) == ([True], [4], [{"cur_scale": 8.0}])
    assert "iteration 4, 32 samples, 320 tokens consumed" in capsys.readouterr().err


def test_a_mean_of_iterates_goes_on_with_the_optimizer_only(engine: FakeEngine, tmp_path: Path) -> None:
    record = make_record(averaging_weight=0.25)
    folder = saved(tmp_path / "c", averaging_weight=record.averaging_weight)
    for flags in ({}, {"no_load_optim": True}):
        assert load_tensors(run_config(load=str(folder), **flags), engine, saved_run(record))[0] == record
    assert engine.weights == [0.25, 0.0]


@pytest.mark.parametrize(
    ("optimizer", "flags", "begins"),
    [
        ("schedule-free", {}, False),
        ("schedule-free", {"reset_iteration": True}, False),
        ("schedule-free", {"no_load_optim": True}, True),
        ("schedule-free", {"finetune": True}, True),
        ("adam", {"finetune": True}, False),
    ],
)
def test_without_the_state_of_a_schedule_free_optimizer_training_begins_with_its_mean(
    engine: FakeEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    optimizer: str,
    flags: dict[str, bool],
    begins: bool,
) -> None:
    record = make_record(config={"optim": {"optimizer": optimizer}})
    load_tensors(run_config(load=str(saved(tmp_path / "c", config=record.config)), **flags), engine, saved_run(record))
    assert engine.begun_with_means == [begins]
    assert ("training starts from the average of the iterates" in capsys.readouterr().err) == begins


def test_a_mean_of_weights_is_not_left_behind_in_silence(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record(config={"optim": {"ema_decay": 0.99}})
    config = run_config(load=str(saved(tmp_path / "c", config=record.config)))
    load_tensors(config, engine, saved_run(record))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "average of the weights" in line]
    assert "(--ema-decay 0.99), which this run drops" in line and line.endswith("add --ema-decay 0.99.")
    engine.averages = object()
    load_tensors(config, engine, saved_run(record))
    assert "average of the weights" not in capsys.readouterr().err


def test_finetuning_takes_only_the_weights(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(load=str(saved(tmp_path / "c")), finetune=True)
    record, progress = load_tensors(config, engine, saved_run())
    assert record == RECORD
    assert progress == Progress()
    assert (engine.asked, engine.updates, engine.loss_scales) == ([False], [None], [])
    assert engine.restarted == [True]
    assert "finetuning the weights" in capsys.readouterr().err


def test_a_reset_iteration_takes_the_moments_as_well(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(load=str(saved(tmp_path / "c")), reset_iteration=True)
    assert config.loading.finetune
    assert not LoadingConfig(reset_iteration=True, no_load_optim=True).takes_optimizer_state
    record, progress = load_tensors(config, engine, saved_run())
    assert (record, progress) == (RECORD, Progress())
    assert (engine.asked, engine.updates, engine.loss_scales) == ([True], [4], [{"cur_scale": 8.0}])
    assert engine.restarted == [False]
    assert "finetuning the weights and optimizer state" in capsys.readouterr().err


def test_a_checkpoint_without_optimizer_state_is_rejected(engine: FakeEngine) -> None:
    record = make_record(config={"control": {"no_save_optim": True}})
    with pytest.raises(CheckpointError, match=r"in c was saved with --no-save-optim .*--no-load-optim .*--finetune"):
        load_tensors(run_config(load="c"), engine, saved_run(record))
    assert engine.asked == []


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim"])
def test_the_weights_of_a_checkpoint_without_optimizer_state_are_usable(
    engine: FakeEngine, tmp_path: Path, flag: str
) -> None:
    record = make_record(config={"control": {"no_save_optim": True}})
    config = run_config(load=str(saved(tmp_path / "c", config=record.config)), **{flag: True})
    assert load_tensors(config, engine, saved_run(record))[0] == record


def test_a_checkpoint_that_disappears_is_an_error(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"the checkpoint in {tmp_path} was removed while it was being loaded"):
        load_tensors(run_config(load=str(tmp_path)), engine, saved_run())


def test_the_reported_progress_is_that_of_the_fallback_checkpoint(engine: FakeEngine, tmp_path: Path) -> None:
    """The record that was looked at first may belong to a checkpoint whose tensors turn out to be damaged."""
    folder = saved(tmp_path / "c", 4)
    saved(folder, 6)
    damage(folder / "iter_0000006")
    record, progress = load_tensors(run_config(load=str(folder)), engine, saved_run(make_record(6)))
    assert progress.step == 4
    assert record == RECORD


def damage(folder: Path, change: Callable[[bytes], bytes] = lambda tail: bytes(b ^ 255 for b in tail)) -> None:
    """Changes the last bytes of every tensor file, keeping its size."""
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-8] + change(content[-8:]))


def started(folder: Path, **changes: Any) -> Start:
    """A start with --save `folder`."""
    return find_start(run_config(save=str(folder), save_interval=1, **changes), MESH)


def test_a_new_run_gets_an_identity_that_its_folder_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    first = started(folder, load=str(folder))
    assert first.saved is None and read_identity(folder) == first.identity
    assert started(folder, load=str(folder)).identity == first.identity, "it has saved nothing, and is the same run"
    assert started(folder).identity == first.identity
    assert started(folder, from_scratch=True).identity.run_id != first.identity.run_id
    assert find_start(run_config(), MESH).identity.run_id


def test_a_run_of_an_older_version_gets_an_identity(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", 4)
    start = started(folder, load=str(folder))
    assert start.saved is not None and start.identity.run_id
    saved(folder, 6, run_id=start.identity.run_id)
    assert started(folder, load=str(folder)).identity == start.identity
    assert started(tmp_path / "b", load=str(saved(tmp_path / "old", 4))).identity != start.identity
    elsewhere = started(tmp_path / "b", load=str(tmp_path / "old")).identity
    assert elsewhere == read_identity(tmp_path / "b"), "the folder knows what the checkpoint does not"


def test_the_checkpoint_of_another_run_is_skipped_unless_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "a", 4, run_id=ONE)
    write_identity(folder, RunIdentity(ONE))
    saved(folder, 8, run_id=TWO)
    start = started(folder, load=str(folder))
    assert start.saved is not None and start.saved.record.progress.step == 4
    text = capsys.readouterr().err
    assert f"skipping checkpoint {folder / 'iter_0000008'}: it belongs to run {TWO}, but {folder} to run {ONE}" in text
    for flags in ({"load": str(folder / "iter_0000008")}, {"load": str(folder), "ckpt_step": 8}):
        named = started(tmp_path / f"b{len(flags)}", **flags)
        assert named.saved is not None and named.saved.record.run_id == named.identity.forked_from["run_id"] == TWO
        with pytest.raises(CheckpointError, match=rf"has checkpoints of run {ONE} \(newest: .*resumes run {TWO}"):
            started(folder, **flags)


def test_nothing_but_the_checkpoints_of_another_run_is_an_error(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", 8, run_id=TWO)
    write_identity(folder, RunIdentity(ONE))
    with pytest.raises(CheckpointError, match=rf"none of the 1 checkpoints(.|\n)*belongs to run {TWO}, but .* {ONE}"):
        started(folder, load=str(folder))


def test_the_tensors_of_another_run_are_not_loaded_instead_of_damaged_ones(engine: FakeEngine, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", 4, run_id=TWO)
    write_identity(folder, RunIdentity(ONE))
    saved(folder, 6, run_id=ONE)
    start = started(folder, load=str(folder))
    damage(folder / "iter_0000006")
    with pytest.raises(
        CheckpointError, match=rf"none of the 2 checkpoints(.|\n)*iter_0000004: it belongs to run {TWO}"
    ):
        load_tensors(start.config, engine, start.saved)


def test_a_run_is_not_continued_into_the_folder_of_another(tmp_path: Path) -> None:
    saved(tmp_path / "a", 4, run_id=ONE)
    saved(tmp_path / "b", 6, run_id=TWO)
    sentence = rf"b has checkpoints of run {TWO} \(newest: iteration 6\), but --load .*a resumes run {ONE}: .*another"
    with pytest.raises(CheckpointError, match=sentence):
        started(tmp_path / "b", load=str(tmp_path / "a"))
    with pytest.raises(CheckpointError, match=r"b already has checkpoints \(newest: iteration 6\), but --load .* none"):
        started(tmp_path / "b", load=str(tmp_path / "empty"))
    evaluated = started(tmp_path / "b", load=str(tmp_path / "a"), eval_only=True)
    assert evaluated.identity.run_id == ONE and read_identity(tmp_path / "b") is None
    assert started(tmp_path / "b", load=str(tmp_path / "a"), from_scratch=True).identity.run_id not in (ONE, TWO)


@pytest.mark.parametrize("run_id", [ONE, ""], ids=["run", "weights"])
def test_a_fine_tuning_continues_its_own_progress(tmp_path: Path, run_id: str) -> None:
    base, own = saved(tmp_path / "base", 4, run_id=run_id), tmp_path / "own"
    flags = {"load": str(base), "finetune": True, "reset_iteration": True}
    first = started(own, **flags)
    assert first.config.loading.finetune and first.saved is not None and first.identity.run_id not in (ONE, "")
    again = started(own, **flags, no_load_optim=True)
    assert again.config.loading.finetune and again.identity == first.identity, "nothing is saved yet"
    saved(own, 2, run_id=first.identity.run_id, finetuned_from=first.identity.finetuned_from)
    for remove in (False, True):
        if remove:
            (own / "run.json").unlink()
        resumed = started(own, **flags, no_load_optim=True, ckpt_step=4)
        assert resumed.identity == first.identity == read_identity(own)
        assert resumed.config.loading == LoadingConfig(load=str(own))
        assert resumed.saved is not None and resumed.saved.record.progress.step == 2


def test_the_newest_good_checkpoint_of_both_folders_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, copies = saved(tmp_path / "here", 4, run_id=ONE), saved(tmp_path / "copies", 4, run_id=ONE)

    def taken() -> Path:
        start = started(here, load=str(here), save_secondary=str(copies))
        assert start.saved is not None and start.identity.run_id == ONE
        return start.saved.found.path

    assert taken() == here / "iter_0000004", "of equal steps, --load has the one that is taken"
    saved(copies, 6, run_id=ONE)
    capsys.readouterr()
    assert taken() == copies / "iter_0000006"
    told = capsys.readouterr().err
    assert f"resuming from the copy {copies / 'iter_0000006'}: --load {here} has no newer checkpoint" in told
    assert (
        "If later ones were deleted there to go back, the copies undo that: stop the run, and delete the later" in told
    )
    saved(copies, 8, run_id=ONE)
    (copies / "iter_0000008" / "manifest.json").write_text("{}")
    assert taken() == copies / "iter_0000006"
    saved(here, 8, run_id=ONE)
    assert taken() == here / "iter_0000008"


def test_copies_do_not_go_next_to_their_originals(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", 4)
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, tmp_path / "link"):
        with pytest.raises(ConfigError, match=rf"--save-secondary {place} is the folder of --save {folder}"):
            started(folder, load=str(folder), save_secondary=str(place))


def test_a_fine_tuning_continues_when_its_base_has_moved_on(tmp_path: Path) -> None:
    base, own = saved(tmp_path / "base", 4, run_id=ONE), tmp_path / "own"
    first = started(own, load=str(base), finetune=True).identity
    saved(own, 2, run_id=first.run_id, finetuned_from=first.finetuned_from)
    saved(base, 6, run_id=ONE)
    assert started(own, load=str(base), finetune=True).identity == first
    for load, step in ((base, 6), (base / "iter_0000006", None)):
        with pytest.raises(
            CheckpointError, match=rf"fine-tuning of run {ONE} at iteration 4.*of run {ONE} at iteration 6"
        ):
            started(own, load=str(load), ckpt_step=step, finetune=True)


def test_a_fine_tuning_is_not_mixed_with_another_run(tmp_path: Path) -> None:
    base, other = saved(tmp_path / "base", 4, run_id=ONE), saved(tmp_path / "other", 6, run_id=TWO)
    flags = {"load": str(base), "finetune": True}
    sentence = rf"other has checkpoints of run {TWO} \(newest: .*this is a fine-tuning of run {ONE} at iteration 4"
    with pytest.raises(CheckpointError, match=sentence):
        started(other, **flags)
    with pytest.raises(CheckpointError, match=r"old has checkpoints of a run of an older version, without identity"):
        started(saved(tmp_path / "old", 6), **flags)
    for load in (base, base / "iter_0000004"):
        with pytest.raises(CheckpointError, match=r"--finetune with --load .* and --save .*mixed.*drop --finetune"):
            started(base, load=str(load), finetune=True)
    assert find_start(run_config(**flags), MESH).identity.finetuned_from["run_id"] == ONE
    assert read_identity(base) is None, "the folder of the base is left alone"


def test_training_continues_without_optimizer_state(engine: FakeEngine, tmp_path: Path) -> None:
    config = run_config(load=str(saved(tmp_path / "c")), no_load_optim=True)
    _, progress = load_tensors(config, engine, saved_run())
    assert progress.step == 4
    assert (engine.asked, engine.updates, engine.loss_scales) == ([False], [None], [])
    assert engine.restarted == [False]


def test_a_fine_tuning_whose_folder_is_lost_continues_from_its_copies(tmp_path: Path) -> None:
    base, own, copies = saved(tmp_path / "base", 4, run_id=ONE), tmp_path / "own", tmp_path / "copies"
    flags = {"load": str(base), "finetune": True, "save_secondary": str(copies)}
    first = started(own, **flags)
    assert first.config.loading.finetune and read_identity(copies) == first.identity
    saved(copies, 2, run_id=first.identity.run_id, finetuned_from=first.identity.finetuned_from)
    shutil.rmtree(own)
    resumed = started(own, **flags)
    assert (resumed.config.loading.finetune, resumed.identity) == (False, first.identity)
    assert resumed.saved is not None and resumed.saved.found.path == copies / "iter_0000002"
    other = saved(tmp_path / "b", 3, run_id=TWO)
    with pytest.raises(CheckpointError, match=rf"b has checkpoints of run {TWO} .*their steps would be mixed"):
        started(other, **flags)
