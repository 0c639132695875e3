"""The limit of open files is raised as far as allowed."""

import contextlib
import os
import resource

import numpy as np
import pytest

from megatron.data.build import allow_open_files
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.order.index_cache import IndexCache
from megatron.errors import TooManyFilesError
from tests.data.corpora import write_corpus


def test_the_limit_of_open_files_is_raised_to_the_hard_limit(few_open_files, capsys):
    allow_open_files(1, 1)
    if few_open_files == resource.RLIM_INFINITY:
        pytest.skip("this system sets no limit")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_open_files
    assert capsys.readouterr().err == ""
    allow_open_files(few_open_files // 2, 1)
    assert f"the data may need {few_open_files // 2 * 2 + 3 + 256} open files" in (said := capsys.readouterr().err)
    assert f"and this system allows {few_open_files}" in said


@pytest.mark.parametrize("what", ["the pair", "the index arrays"])
def test_too_many_open_files_are_called_that(what, tmp_path, capsys):
    write_corpus(tmp_path / "part", [11, 5, 17])
    cache = IndexCache(tmp_path / "cache")
    made = {"rows": np.arange(4)}
    cache.arrays("rows", {"a": 1}, lambda: made)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(open(os.devnull))
        with pytest.raises(
            TooManyFilesError, match=r"Too many open files. The limit for this process is \d+ open files. Raise"
        ):
            if what == "the pair":
                IndexedDataset(tmp_path / "part")
            else:
                cache.arrays("rows", {"a": 1}, lambda: made)
    finally:
        for stream in held:
            stream.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "damaged" not in capsys.readouterr().err
    assert cache.arrays("rows", {"a": 1}, lambda: {})["rows"].tolist() == [0, 1, 2, 3]
