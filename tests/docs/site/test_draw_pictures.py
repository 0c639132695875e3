"""The drawings in docs/pictures are what the program draws, and say what the code does."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.site import draw_pictures
from docs.site.drawings import ranks
from megatron.parallel.mesh import ParallelMesh, standard_axes

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
