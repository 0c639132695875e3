"""Groups of weighted sources read from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.config.command_lines import small


def test_groups_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "groups.txt"
    file.write_text('"A: 1 0:1 a" "B: 1 0:1 b"\n')
    (tmp_path / "train.txt").write_text('"T: 1 0:1 t"\n')
    text = f"--train-weighted-split-paths-path {tmp_path}/train.txt --valid-weighted-split-paths-path {file}"
    data = small(text, drop="--data-path").data
    assert [group.name for group in (*data.train_groups, *data.valid_groups)] == ["T", "A", "B"]
    with pytest.raises(
        ConfigError, match="--valid-weighted-split-paths and --valid-weighted-split-paths-path are both"
    ):
        small(f'{text} --valid-weighted-split-paths "A: 1 0:1 a"', drop="--data-path")
    file.write_text("A: 1 0:1 a\n")
    with pytest.raises(ConfigError, match="must contain one line of groups in double quotes"):
        small(text, drop="--data-path")
    with pytest.raises(ConfigError, match=r"--test-weighted-split-paths-path none\.txt cannot be read"):
        small(f"{text} --test-weighted-split-paths-path none.txt", drop="--data-path")
