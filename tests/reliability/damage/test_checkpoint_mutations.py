"""Damaged checkpoint directories: damage is found before it is used, or makes no difference.

By hand, 100,000 cases: `python -m tests.reliability.damage.checkpoint_mutations`.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from megatron.checkpoint import reader
from megatron.checkpoint.manifest import MANIFEST_NAME, folder_name
from megatron.errors import DamagedError
from tests.checkpoint.made.versions import FORMS
from tests.reliability.damage.checkpoint_mutations import (
    BYTES,
    FILES,
    MUTATIONS,
    NEWER,
    OLDER,
    Unnoticed,
    load_damaged,
    run,
    take_damaged_lock,
    undamaged,
)
from tests.reliability.disks.memory_disk import Tree


@pytest.fixture(scope="module", params=FORMS)
def original(request: pytest.FixtureRequest) -> Tree:
    """Two checkpoints in each form."""
    return undamaged(request.param)


def copied(tree: Tree) -> Tree:
    return {name: dict(node) if isinstance(node, dict) else node for name, node in tree.items()}


def test_a_sample_of_damage(pytestconfig: pytest.Config) -> None:
    """A sample; more cases with `--cases`, others with `--fuzz-seed`. A failure says its number."""
    cases = pytestconfig.getoption("--cases") // 4
    campaign = run(cases, pytestconfig.getoption("--fuzz-seed"))
    assert campaign.failures == []
    assert sum(campaign.became.values()) == cases
    assert {name for name, _ in campaign.became} == {*MUTATIONS, "lock"}
    found = sum(count for (_, became), count in campaign.became.items() if became.startswith("found"))
    assert cases * 0.6 < found < cases * 0.9


def test_without_damage_nothing_is_found(original: Tree) -> None:
    assert load_damaged(copied(original), original) == "equal"
    tree = copied(original)
    del tree[folder_name(NEWER)]
    with pytest.raises(Unnoticed, match="the older step was loaded without a word"):
        load_damaged(tree, original)
    with pytest.raises(Unnoticed, match="nothing is found"):
        load_damaged({}, original)


def test_a_check_that_is_left_out_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign fails when the code that finds the damage is not there."""
    monkeypatch.setattr(reader.CheckpointReader, "verify", lambda self: None)
    monkeypatch.setattr(reader.zlib, "crc32", lambda content: 0)
    campaign = run(len(MUTATIONS) * 4)
    assert any("values were loaded that are not those of step 2" in failure for failure in campaign.failures)


def test_swapped_files_of_one_size_are_distinguished(original: Tree) -> None:
    tree = copied(original)
    newer, older = tree[folder_name(NEWER)], tree[folder_name(OLDER)]
    newer[MANIFEST_NAME] = older[MANIFEST_NAME]
    assert load_damaged(tree, original) == "found"
    tree = copied(original)
    tree[folder_name(NEWER)] = dict(tree[".other"])  # a whole folder of another run is not damage
    with pytest.raises(Unnoticed, match=f"not those of step {NEWER + 7}"):
        load_damaged(tree, original)


def test_mutations_are_reproducible_and_change_something(original: Tree) -> None:
    for name, mutate in MUTATIONS.items():
        changed = []
        for _ in range(2):
            tree = copied(original)
            mutate(Random(name), tree)
            changed.append(tree)
        assert changed[0] == changed[1]
    data = bytearray(original[folder_name(NEWER)][FILES[1]])
    for name, change in BYTES.items():
        assert any(one != data for one in (altered(change, seed, data) for seed in range(8))), name


def altered(change: object, seed: int, data: bytearray) -> bytearray:
    copy = bytearray(data)
    change(Random(seed), copy)  # type: ignore[operator]
    return copy


def test_a_damaged_lock_is_taken_or_refused(tmp_path: Path) -> None:
    assert {take_damaged_lock(Random(seed), tmp_path) for seed in range(30)} <= {"lock taken over", "lock refused"}


def test_damage_of_every_checkpoint_is_an_error(original: Tree) -> None:
    tree = copied(original)
    for step in (OLDER, NEWER):
        tree[folder_name(step)][MANIFEST_NAME] = b"{}"
    with pytest.raises(Exception, match="none of the 2 checkpoints in /run can be used") as failure:
        load_damaged(tree, original)
    assert not isinstance(failure.value, DamagedError)
