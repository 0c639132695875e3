"""The limit of open files is raised as far as allowed."""

from __future__ import annotations

import resource

import pytest

from megatron.data.datasets.open_files import allow_open_files

SOURCES = 300


@pytest.fixture
def few_open_files():
    """A limit below what the sources take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, SOURCES), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_raised_to_the_hard_limit(few_open_files, capsys):
    allow_open_files(10)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(SOURCES, few_open_files)
    if few_open_files == resource.RLIM_INFINITY:
        pytest.skip("this system sets no limit")
    allow_open_files(few_open_files + 1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_open_files
    assert f"and this system allows {few_open_files}" in capsys.readouterr().err
