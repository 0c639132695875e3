"""Documents name existing files and flags, begin with a summary, and have tables that follow from the code."""

import re
from functools import cache
from pathlib import Path

import pytest

from examples.hello_deepspeed.flags import HelloDeepSpeedEngineFlags
from megatron.config.flags.fields import flags_of
from megatron.config.parse import field_flags
from megatron.config.sampling_flags import BeamFlags
from megatron.engine.memory.closed_form import Partitioning, predicted_bytes
from tests.helpers.architecture.tables import LOADED_LATER

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
OF_OTHERS = ("docs/seeds/", "docs/coming_from/")  # which name files and flags of other projects
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(page for page in PAGES if not page.startswith(OF_OTHERS))]
FLAGS_OF_OTHERS = {  # vLLM, DeepSpeed's launcher, docker, torchrun, forks of Megatron
    *("--tensor-parallel-size", "--bind_cores_to_rank", "--num_gpus", "--shm-size", "--rdzv-endpoint"),
    *("--extra-eval-data-path", "--from-weights"),
}


def test_files_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        named = re.findall(r"`((?:examples|tools|tests|benchmarks|megatron|docs|csrc)/[\w./]+)`", text)
        if document == "docs/published_commands.md":
            named = []  # of the projects that published them
        links = re.findall(r"\]\((?!http|(?:\.\./)?reference/|project/)([^)#]+)\)", text)  # made with the site
        missing = [name for name in named if not (ROOT / name).exists()]
        missing += [name for name in links if not (ROOT / document).parent.joinpath(name).exists()]
        assert not missing, f"{document} names {missing}"


@cache
def known_flags() -> tuple[frozenset[str], str]:
    """The flags of the trainer and of other projects, and the texts of the programs that declare the others."""
    flags = (ROOT / "tests" / "config" / "golden" / "flags.txt").read_text()
    names = {*re.findall(r"^(--[\w-]+)", flags, flags=re.M), *FLAGS_OF_OTHERS}
    sections = [*flags_of(BeamFlags), *flags_of(HelloDeepSpeedEngineFlags)]
    for entry in (*field_flags().values(), *sections):
        names.update(entry.spellings)
    folders = ("tools", "tasks", "examples", "tests", "tests/config/published", "trident/launch")
    paths = [path for folder in folders for path in (ROOT / folder).glob("*") if path.is_file()]
    paths += [path for folder in ("tools", "tasks") for path in (ROOT / folder).glob("*/*.py")]
    return frozenset(names), "\n".join(path.read_text() for path in [*paths, ROOT / "docs/site/layouts.py"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_that_are_named_exist(document: str) -> None:
    known, elsewhere = known_flags()
    for name in set(re.findall(r"`(--[a-z][a-z0-9_-]+)", (ROOT / document).read_text())):
        field = name.removeprefix("--").replace("-", "_")
        positive = name.replace("--no-", "--")
        is_known = {name, positive, positive.replace("--", "--no-", 1)} & known
        assert is_known or re.search(rf"\b{field}\b|{name}", elsewhere), name


def test_the_extras_of_readme_are_those_of_the_package() -> None:
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.search(r"\(extras: `([\w -]+)`\)", (ROOT / "README.md").read_text())
    assert extras is not None
    assert extras.group(1).split() == re.findall(r"^([\w-]+) = \[", table, flags=re.M)


def test_the_page_of_the_tools_lists_every_program() -> None:
    page = (ROOT / "tools" / "README.md").read_text(encoding="utf-8")
    programs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").rglob("*.py")} - set(LOADED_LATER)
    assert set(re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", page, flags=re.M)) == programs


def table_of(name: str) -> list[list[str]]:
    """The rows of a computed table of docs/choosing_a_layout.md, its head first."""
    page = (ROOT / "docs" / "choosing_a_layout.md").read_text(encoding="utf-8")
    text = page.partition(f"<!-- computed: {name} -->\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


def test_gigabytes_of_a_layout_are_those_of_the_closed_form() -> None:
    head, *rows = table_of("gigabytes")
    sizes = [float(cell.removesuffix(" B")) * 1e9 for cell in head[4:]]
    assert len(rows) == 9 and len(sizes) == 4
    for ranks, split, copies, stage, *shown in rows:
        assert int(ranks) == int(split) * int(copies)
        partitioning = Partitioning(int(stage), int(copies), weight_bytes=2)
        held = [predicted_bytes([[int(size / int(split))]], partitioning).total / 1e9 for size in sizes]
        assert shown == [f"{amount:.1f}" for amount in held]
