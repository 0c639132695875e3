"""The limit of open files is raised as far as allowed."""

from __future__ import annotations

import resource

import pytest

from megatron.data.datasets.open_files import allow_open_files
from tests.data.datasets.token_datasets import MANY_SOURCES


def test_the_limit_of_open_files_is_raised_to_the_hard_limit(few_open_files, capsys):
    allow_open_files(10)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(MANY_SOURCES, few_open_files)
    if few_open_files == resource.RLIM_INFINITY:
        pytest.skip("this system sets no limit")
    allow_open_files(few_open_files + 1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_open_files
    assert f"and this system allows {few_open_files}" in capsys.readouterr().err
