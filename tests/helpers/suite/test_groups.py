"""Tests that share an expensive fixture share a worker: a group that is spread over the workers would train twice."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.xdist_group("groups")


def test_a_group_has_one_worker(request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("pytest runs in one process")
    assert request.node.nodeid.endswith("@groups")
