"""The whole program, flags to exit code, on tiny data: what a resume, a layout, a mask or a stop does to a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.checkpoint.record import Progress
from megatron.errors import ExitCode
from megatron.train.restarts.restore import warn_if_done
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.programs import forking_python
from tests.helpers.tiny_run import TinyCorpus, losses, steps, train, write_tiny_corpus
from tests.train.samples import optim_config

FIELDS = ("lm_loss", "gradient_norm", "learning_rate", "consumed_samples")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps without interruption, with dropout."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(corpus.flags(folder=folder)) == (0, "")
    return folder


def test_loss_falls_and_files_are_written(whole: Path) -> None:
    curve = losses(whole)
    assert sorted(curve) == list(range(1, 9))
    assert curve[8] < curve[1] - 0.05
    assert (whole / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert (whole / "run" / "config.json").exists()


@pytest.mark.parametrize("flags", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_resume_is_bit_exact(corpus: TinyCorpus, tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert train(corpus.flags(*flags, folder=tmp_path / "whole"))[0] == 0
    assert train(corpus.flags(*flags, folder=tmp_path / "cut", exit_interval=4))[0] == 0
    assert sorted(losses(tmp_path / "cut")) == [1, 2, 3, 4]
    assert train(corpus.flags(*flags, folder=tmp_path / "cut"))[0] == 0
    assert steps(tmp_path / "cut", *FIELDS) == steps(tmp_path / "whole", *FIELDS)


LAYOUTS = {
    "tp2pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    "dp2-zero3": (2, {"zero_stage": 3, "micro_batch_size": 1}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}),
    "recompute": (1, {"micro_batch_size": 4}),
    "recompute-pp2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", mark_campaign(LAYOUTS, ["tp2pp2", "dp2-zero3", "recompute"]))
def test_hidden_dropout_is_the_same_in_every_layout(corpus: TinyCorpus, tmp_path: Path, name: str) -> None:
    world, changes = LAYOUTS[name]
    more = ["--checkpoint-activations"] if name.startswith("recompute") else []
    settings = {"hidden_dropout": 0.2, "attention_dropout": 0, "train_iters": 5}
    assert train(corpus.flags(run_dir=tmp_path / "one" / "run", **settings))[0] == 0
    assert train(corpus.flags(*more, run_dir=tmp_path / "other" / "run", **settings, **changes), world)[0] == 0
    one, other = losses(tmp_path / "one"), losses(tmp_path / "other")
    assert one.keys() == other.keys()
    for step, loss in one.items():
        assert other[step] == pytest.approx(loss, rel=1e-5), step


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"])
def test_document_boundaries_mean_the_same_in_every_layout(corpus: TinyCorpus, tmp_path: Path, flag: str) -> None:
    settings = {"hidden_dropout": 0, "attention_dropout": 0, "train_iters": 4}
    assert train(corpus.flags(flag, run_dir=tmp_path / "one" / "run", **settings))[0] == 0
    _, changes = LAYOUTS["pp2"]
    assert train(corpus.flags(flag, run_dir=tmp_path / "two" / "run", **settings, **changes), 2)[0] == 0
    assert train(corpus.flags(run_dir=tmp_path / "plain" / "run", **settings))[0] == 0
    one, two, plain = losses(tmp_path / "one"), losses(tmp_path / "two"), losses(tmp_path / "plain")
    assert one == pytest.approx(two, rel=1e-5)
    assert one != pytest.approx(plain, rel=1e-5)


def test_evaluation_touches_no_training_state(corpus: TinyCorpus, tmp_path: Path, whole: Path) -> None:
    assert train(corpus.flags(folder=tmp_path, eval_interval=2))[0] == 0
    assert losses(tmp_path) == losses(whole)


def test_batch_size_ramps_up_and_resumes(corpus: TinyCorpus, tmp_path: Path) -> None:
    ramp = {
        "train_iters": None,
        "train_samples": 38,
        "rampup_batch_size": (2, 2, 12),
        "global_batch_size": 6,
        "lr_warmup_fraction": None,
    }
    assert train(corpus.flags(folder=tmp_path / "whole", **ramp))[0] == 0
    sizes = [size for (size,) in steps(tmp_path / "whole", "global_batch_size").values()]
    assert sizes == sorted(sizes)
    assert sizes[0] == 2
    assert sizes[-1] == 6
    assert train(corpus.flags(folder=tmp_path / "cut", exit_interval=3, **ramp))[0] == 0
    tokens = {**ramp, "train_samples": None, "train_tokens": 38 * 32}  # the same length, counted otherwise
    assert train(corpus.flags(folder=tmp_path / "cut", **tokens))[0] == 0
    assert steps(tmp_path / "cut", *FIELDS) == steps(tmp_path / "whole", *FIELDS)


def test_a_range_beyond_the_samples_ends_the_run(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Its data counts towards --train-samples; a longer run skips it and goes on."""
    skip = ["--skip-train-iteration-range", "2-9"]
    for samples, last in ((12, (1, 4)), (44, (3, 44))):
        flags = corpus.flags(*skip, folder=tmp_path, train_iters=None, train_samples=samples, lr_decay_samples=100)
        assert train(flags)[0] == 0
        logged = steps(tmp_path, "consumed_samples")
        assert (max(logged), *logged[max(logged)]) == last


def test_longer_run_continues_the_order(corpus: TinyCorpus, tmp_path: Path, whole: Path) -> None:
    fixed = {"lr_decay_iters": 8}
    assert train(corpus.flags(folder=tmp_path / "long", train_iters=16, **fixed))[0] == 0
    assert train(corpus.flags(folder=tmp_path / "short", **fixed))[0] == 0
    first = losses(tmp_path / "short")
    assert train(corpus.flags(folder=tmp_path / "short", train_iters=16, **fixed))[0] == 0
    prolonged = losses(tmp_path / "short")
    assert len(prolonged) == 16
    assert {step: prolonged[step] for step in first} == first


def test_finetune_starts_over_with_the_weights(corpus: TinyCorpus, tmp_path: Path, whole: Path) -> None:
    flags = corpus.flags("--finetune", load=whole / "checkpoints", run_dir=tmp_path / "run", train_iters=2)
    assert train(flags)[0] == 0
    tuned = steps(tmp_path, "lm_loss", "consumed_samples")
    assert sorted(tuned) == [1, 2]
    assert tuned[1][1] == 4
    assert tuned[1][0] < losses(whole)[1] - 0.05


def test_sgd_resumes_with_its_momentum(corpus: TinyCorpus, tmp_path: Path) -> None:
    sgd = {"optimizer": "sgd", "lr": 0.05}
    assert train(corpus.flags(folder=tmp_path / "whole", **sgd))[0] == 0
    assert train(corpus.flags(folder=tmp_path / "cut", exit_interval=4, **sgd))[0] == 0
    assert train(corpus.flags(folder=tmp_path / "cut", **sgd))[0] == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_nothing_left_to_train_gives_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    optim = optim_config(train_iters=60)
    warn_if_done(optim, Progress(step=59))
    assert capsys.readouterr().err == ""
    warn_if_done(optim, Progress(step=400, consumed_samples=3200))
    assert "at iteration 400 (3200 samples) and the run ends at iteration 60" in capsys.readouterr().err


def test_what_a_run_says_before_it_starts(corpus: TinyCorpus, tmp_path: Path) -> None:
    """A missing checkpoint and empty splits are warnings; a missing package ends the run before anything is built."""
    few = write_tiny_corpus(tmp_path, documents=2)
    flags = few.flags(train_iters=1, split="969,30,1", load=tmp_path / "chekpoints", run_dir=tmp_path / "run")
    program = [forking_python(), str(Path(pretrain_gpt.__file__))]
    done = subprocess.run([*program, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for sentence in (
        f"warning: --load {tmp_path}/chekpoints: the folder {tmp_path}/chekpoints does not exist (nearest",
        "warning: the valid split is empty: --split 969,30,1 gives it none of the sequences of",
        "warning: the test split is empty",
    ):
        assert done.stderr.count(sentence) == 1, done.stderr
    flags = few.flags(train_iters=1, wandb_project="p", run_dir=tmp_path / "other")
    code = (
        "import sys; sys.modules['wandb'] = None; sys.argv[0] = 'x'; import pretrain_gpt as p; "
        "p.process_exit.exit_with(p.main)"
    )
    (tmp_path / "without.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(pretrain_gpt.__file__).parent)}
    words = [forking_python(), str(tmp_path / "without.py"), *flags]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "requires the package wandb" in done.stderr) == (64, True), done.stderr
    assert "DeepSpeed" not in done.stderr and not (tmp_path / "other").exists()


def test_a_changed_shape_is_rejected_with_both_values(corpus: TinyCorpus, tmp_path: Path, whole: Path) -> None:
    code, text = train(corpus.flags(load=whole / "checkpoints", run_dir=tmp_path / "run", hidden_size=64))
    assert code == ExitCode.USAGE
    assert "--hidden-size" in text
    assert "64" in text
    assert "32" in text
