"""The whole program on several sources: a blend that changes at a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint import newest_record
from megatron.checkpoint.record import Record
from megatron.data.order.plan import GroupPlan
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.tiny_run import TinyCorpus, steps, train, write_tiny_corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[TinyCorpus]:
    folders = [tmp_path_factory.mktemp("corpora") / name for name in ("web", "books", "code")]
    for folder in folders:
        folder.mkdir()
    return [write_tiny_corpus(folder, seed=number) for number, folder in enumerate(folders)]


def stored_plan(folder: Path) -> GroupPlan:
    """The training plan of the newest checkpoint."""
    found = newest_record(folder / "checkpoints", ParallelMesh.single())
    assert found is not None
    plan = Record.from_json(found.record, found.path).data_plan.train
    assert plan is not None
    return plan


def test_a_blend_changes_at_a_resume(corpora: list[TinyCorpus], tmp_path: Path) -> None:
    """16 samples at 3 : 1, then 16 at 1 : 1 : 2 with a third source, stopped in between and resumed again.

    The third source's file has the name of the first's, so it is numbered.
    """
    first = corpora[0]
    log = "--log-per-source-loss"
    two = ("3", corpora[0].prefix, "1", corpora[1].prefix)
    three = ("1", corpora[0].prefix, "1", corpora[1].prefix, "2", corpora[2].prefix)
    assert train(first.flags(log, folder=tmp_path, data_path=two, exit_interval=4))[0] == 0
    code, text = train(first.flags(folder=tmp_path, data_path=three))
    assert code == 65 and "add --change-data-blend to continue with this blend" in text
    assert train(first.flags(log, "--change-data-blend", folder=tmp_path, data_path=three, exit_interval=6))[0] == 0
    assert train(first.flags(log, folder=tmp_path, data_path=three))[0] == 0
    plan = stored_plan(tmp_path)
    assert [(phase.first, phase.consumed, phase.weights) for phase in plan.phases] == [
        (0, (), [0.75, 0.25]),
        (16, (12, 4), [0.25, 0.25, 0.5]),
    ]
    assert [count for (count,) in steps(tmp_path, "consumed_samples").values()] == list(range(4, 33, 4))
    per_step = [one for (one,) in steps(tmp_path, "source_losses").values()]
    samples = [{name: loss["tokens"] // 32 for name, loss in losses.items()} for losses in per_step]
    names = [f"tiny_text_document{number}" for number in ("", "#2", "#3")]
    assert samples == [{names[0]: 3, names[1]: 1}] * 4 + [{names[0]: 1, names[1]: 1, names[2]: 2}] * 4
    for loss, by_source in steps(tmp_path, "lm_loss", "source_losses").values():
        total = sum(one["lm_loss"] * one["tokens"] for one in by_source.values())
        assert total / sum(one["tokens"] for one in by_source.values()) == pytest.approx(loss, rel=1e-6)
