"""What all tests share: `gpu` tests skip themselves, and the reference data is found or named in the skip."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.data.databases import KINDS, Database, new_database
from tests.helpers.campaign_cases import DEFAULT_CASES
from tests.helpers.ranks import LAUNCH_VARIABLES
from tests.helpers.suite import selection

# No test fails because a shared machine was slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# A suite that is started within a job of a launcher is no rank of it.
for _name in LAUNCH_VARIABLES:
    os.environ.pop(_name, None)

# Workers share the cores: with a thread of each for every core, they spend most of their time waiting for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A forked child must not collect what its parent left in cycles: a process group of gloo has threads that the child
# lacks, and taking it down there hangs or ends the child with signal 11.
os.register_at_fork(after_in_child=gc.freeze)

# Where an environment variable asks Python to write no bytecode, each of the many processes of the suite would compile
# torch again, 5 s instead of 2.5. So bytecode is kept after all, but not beside the sources.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault(
        "PYTHONPYCACHEPREFIX", str(Path(sys.prefix, ".trident-megatron", "bytecode"))
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--cases` and `--fuzz-seed` of the campaigns, and the options that select tests."""
    selection.add_options(parser)
    parser.addoption(
        "--cases",
        type=int,
        default=DEFAULT_CASES,
        help="how many random cases are tried; more than by default also runs what is marked `campaign`",
    )
    parser.addoption("--fuzz-seed", type=int, default=1, help="the same seed and number give the same damaged file")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` without one, and `campaign` if none is asked for; workers begin with those marked slow.

    So no worker is left with a long test while the others have nothing to do. Tests of a file that share something of
    it, such as a trained network, stay on one worker, which makes it once.
    """
    selection.select(config, items)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
        for item in items:
            if item.get_closest_marker("xdist_group") is None and _shares_a_fixture_of_its_file(item):
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if config.getoption("--cases") <= DEFAULT_CASES:
        for item in items:
            if item.get_closest_marker("campaign"):
                item.add_marker(pytest.mark.skip(reason=f"part of the campaign: --cases {DEFAULT_CASES + 1} or more"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none"))


def pytest_collection_finish() -> None:
    """Takes what the test files have imported out of garbage collections.

    DeepSpeed collects garbage several times for each engine that it makes: over everything that a worker has imported,
    one takes a second. A forked child that collects would copy all of that memory, too.
    """
    gc.collect()
    gc.freeze()


def _shares_a_fixture_of_its_file(item: pytest.Item) -> bool:
    fixtures = getattr(item, "_fixtureinfo", None)
    definitions = fixtures.name2fixturedefs.values() if fixtures is not None else ()
    return any(definition.scope == "module" for found in definitions for definition in found)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data next to the checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the reference data is not there: {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database of each kind that holds document stores."""
    with new_database(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def sqlite_database(tmp_path: Path) -> Iterator[Database]:
    """An empty SQLite database."""
    with new_database("sqlite", tmp_path) as made:
        yield made


@pytest.fixture
def mongo_database(tmp_path: Path) -> Iterator[Database]:
    """An empty MongoDB database of the in-process double."""
    with new_database("mongomock", tmp_path) as made:
        yield made
