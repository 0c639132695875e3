"""The hosts and the Slurm that these tests share: started once, or the reason why they cannot be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.machines.cluster import REPOSITORY, Cluster, missing_for_hosts, missing_for_slurm
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts, with Slurm if it is installed."""
    if missing_for_hosts():
        pytest.skip(missing_for_hosts())
    with Cluster(tmp_path_factory.mktemp("cluster"), with_slurm=not missing_for_slurm()) as cluster:
        yield cluster


@pytest.fixture
def slurm(hosts: Cluster) -> Cluster:
    """The hosts, if Slurm runs on them."""
    if missing_for_slurm():
        pytest.skip(missing_for_slurm())
    return hosts


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the project's programs, made the current one."""
    for name in ("tools", "megatron", "trident", "examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    assert os.getcwd() == str(tmp_path)
    return tmp_path


@pytest.fixture
def corpus(tmp_path: Path) -> TinyCorpus:
    """A small corpus in the same folder."""
    return write_tiny_corpus(tmp_path, documents=300)
