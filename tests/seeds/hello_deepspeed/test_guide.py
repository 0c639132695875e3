"""Every command of docs/tutorial_deepspeed.md and docs/seeds/hello_deepspeed.md, run in their order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port
from tests.seeds.hello_deepspeed.runs import experiments, steps

ROOT = Path(__file__).resolve().parents[3]
TUTORIAL, PAGE = ("docs/tutorial_deepspeed.md", "docs/seeds/hello_deepspeed.md")
# Stands in for the program that binds a process to cores, of which the test needs only that it starts the process.
NUMACTL = r"""#!/bin/sh
if [ "$1" = --hardware ]; then printf 'available: 1 nodes (0)\nnode 0 cpus: 0 1\nnode distances:\n'; exit; fi
while [ "${1#-}" != "$1" ]; do shift 2; done
exec "$@"
"""
# The launchers, with processes that are forked.
LAUNCHERS = """
torchrun() {{ python -m torch.distributed.run --master_port={port} "$@"; }}
deepspeed() {{ python -m deepspeed.launcher.runner --bind_core_list 0-1 --master_port={port} "$@"; }}
"""


def blocks(document: str) -> str:
    """The shell blocks of a document, one after another."""
    return "\n".join(re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(), flags=re.S))


@pytest.mark.slow
@pytest.mark.full
def test_003_5_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident", "examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "numactl").write_text(NUMACTL)
    (tmp_path / "bin" / "numactl").chmod(0o755)
    small = "tools/runs/zero_table.py --num-layers 1 --hidden-size 32 --steps 2"
    commands = blocks(TUTORIAL).replace("tools/runs/zero_table.py", small) + blocks(PAGE)
    head = f'set -euo pipefail\nexport PATH="{tmp_path}/bin:$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1\n'
    python = f'python() {{ "{forking_python()}" "$@"; }}\n'
    program = head + python + LAUNCHERS.format(port=free_port()) + commands
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    first, *others = experiments(tmp_path / "experiments")
    assert steps(first) == (8, 16, 20, 24, 30)
    assert len(others) >= 1
    assert [steps(folder) for folder in experiments(tmp_path / "experiment_deepspeed")][:4] == [(4,)] * 4
    plain = re.findall(r"^step 20 loss (\S+)$", finished.stdout, flags=re.M)
    assert len(plain) == 2  # without DeepSpeed and with it
    assert all(float(loss) < 4.5 for loss in plain)
    assert re.search(r"^ +3 +all .* \(0\) ", finished.stdout, flags=re.M)
