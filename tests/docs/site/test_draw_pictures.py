"""The drawings in docs/pictures are what the program draws, and say what the code does."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from docs.site import draw_pictures
from docs.site.drawings import batch, checkpoint, ranks, sequence
from megatron.data.datasets.sample import Sample
from megatron.data.loader import MicroBatches
from megatron.parallel.mesh import Axis, ParallelMesh, standard_axes
from megatron.parallel.sequence.split import SequenceSplit

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures"


def test_the_committed_files_are_those_that_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_pictures.main(["--output", str(tmp_path / "new")]) == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in PICTURES.glob("*.svg")}, (
        "run python docs/site/draw_pictures.py, and look at the pictures"
    )
    assert len(capsys.readouterr().out.splitlines()) == len(drawn) == 7
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert not re.search(rb"(href|src)=|url\(h", text), "a drawing needs no other file"
        _, _, width, height = (float(part) for part in root.attrib["viewBox"].split())
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, wide, high = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width and 0 <= y <= y + high <= height


def test_ranks_are_numbered_as_in_a_run() -> None:
    axes = standard_axes(8, pp=ranks.PIPELINE, tp=ranks.TENSOR)
    for stage, copy, part in itertools.product(range(ranks.PIPELINE), range(ranks.DATA), range(ranks.TENSOR)):
        mesh = ParallelMesh.at(axes, ranks.rank_of(stage, copy, part))
        assert (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank) == (stage, copy, part)
    drawn = ranks.draw_ranks()
    assert all(f">rank {number}<" in drawn for number in range(8))


def test_ranks_have_the_blocks_of_a_sample_that_are_drawn() -> None:
    ring = Axis("cp", 0, sequence.RANKS, tuple(range(sequence.RANKS)))
    for owners, documents in ((sequence.CAUSAL, (8,)), (sequence.BY_DOCUMENT, sequence.DOCUMENTS)):
        width = 16  # tokens of a block
        segments = np.repeat(np.arange(len(documents)), np.array(documents) * width)[None]
        (parts,) = SequenceSplit(ring, Axis.single("sp"), by_document=len(documents) > 1).parts(segments.size, segments)
        drawn = [np.flatnonzero(np.repeat(owners, width) == rank).tolist() for rank in range(sequence.RANKS)]
        assert parts.tolist() == drawn


class _Numbered:
    """A dataset whose samples say their number."""

    def __len__(self) -> int:
        return 8

    def read(self, number: int) -> Sample:
        return Sample(np.full(3, number))

    def source_of(self, number: int) -> int:
        return 0


def test_samples_are_shared_out_as_in_a_run() -> None:
    for copy in range(2):
        sizes = {"first_sample": 0, "global_batch_size": 8, "micro_batch_size": 2, "dp_size": 2}
        own = MicroBatches(_Numbered(), dp_rank=copy, **sizes)
        steps = [[int(number) for number in micro.sample_ids] for micro in own]
        assert ranks.SAMPLES[copy] == ", ".join(str(number) for step in steps for number in step)
        shown = ", then ".join(" and ".join(str(number) for number in step) for step in steps)
        assert f">samples {shown}<" in batch.draw_batch()


def test_the_pieces_make_up_the_tensor() -> None:
    for count in (2, 3):
        rows = [row for rank in range(count) for row in range(*checkpoint.rows_of(rank, count))]
        assert rows == list(range(checkpoint.ROWS))
    assert "pieces_00002.safetensors" in checkpoint.draw_checkpoint()
