"""The commands of docs/checkpoints.md, run in their order on small checkpoints."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.helpers.programs import forking_python
from tests.trident.convert.megatron_output.networks import GPT2, write_network

ROOT = Path(__file__).resolve().parents[3]


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident"):
        (tmp_path / name).symlink_to(ROOT / name)
    for step in (50, 100, 150):
        write_network(tmp_path / "run", GPT2, step=step)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "demo").symlink_to(tmp_path / "run" / "checkpoints")
    guide = (ROOT / "docs" / "checkpoints.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", guide, flags=re.S))
    program = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{blocks}'
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == 150
    assert "EQUAL: all 28 tensors, bit for bit" in finished.stdout  # the same random tensors at every step
    assert (tmp_path / "checkpoints" / "mean" / "iter_0000150").is_dir()
    assert len((tmp_path / "mean.jsonl").read_text().splitlines()) == 1
    assert "iter_0000100 is good: every byte of its 1 files" in finished.stdout
    assert "would delete copies/demo/iter_0000100" in finished.stdout
    assert [path.name for path in (tmp_path / "copies" / "demo").glob("iter_*")] == ["iter_0000150"]
    assert (tmp_path / "exported" / "universal" / "latest_universal").is_file()
    assert (tmp_path / "exported" / "megatron" / "iter_0000150" / "mp_rank_01_001" / "model_optim_rng.pt").is_file()
