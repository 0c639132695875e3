"""Documents name existing files and flags, begin with a summary, and have tables that follow from the code."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_title_and_a_summary(page: str) -> None:
    title, _, first = (ROOT / page).read_text(encoding="utf-8").partition("\n")
    assert re.fullmatch(r"# \S.+", title)
    assert re.match(r"\n[^#<|-].{40,}", first) and not first.startswith("\n```"), page


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


def test_readme_is_short_and_begins_with_the_readers_text() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    commands = [line for line in "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S)).splitlines()]
    programs = [line.split()[1] for line in commands if "my_text" in line and "torchrun" not in line]
    assert programs == ["train_on_text.py", "tools/runs/plot_run.py", "tools/serve.py", "tools/dashboard.py"]
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+\.png)\)", text)
    assert pictures == ["docs/quickstart_loss.png", "docs/images/chat.png"]
    assert all((ROOT / picture).stat().st_size < 150_000 for picture in pictures)
    assert len(re.findall(r"^One H100, .*: ", text, flags=re.M)) == 1, "the figures of GPUs are on one line"


def test_the_extras_of_readme_are_those_of_the_package() -> None:
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.search(r"\(extras: `([\w -]+)`\)", (ROOT / "README.md").read_text())
    assert extras is not None
    assert extras.group(1).split() == re.findall(r"^([\w-]+) = \[", table, flags=re.M)


def test_the_page_of_the_tools_lists_every_program() -> None:
    page = (ROOT / "tools" / "README.md").read_text(encoding="utf-8")
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tools").rglob("*.py")}
    programs = {name: path for name, path in files.items() if name not in LOADED_LATER}
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", page, flags=re.M))
    texts = {name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in programs.items()}
    assert rows == {name: text.partition("\n")[0] for name, text in texts.items()}


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


def test_the_idle_share_of_a_pipeline_is_that_of_its_formula() -> None:
    head, *rows = table_of("idle share")
    for stages, *shown in rows:
        waits = int(stages) - 1
        micro_batches = [int(cell.removeprefix("m = ")) for cell in head[1:]]
        assert shown == [f"{100 * waits / (count + waits):.1f} %" for count in micro_batches]
