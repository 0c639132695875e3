"""Every command of docs/tutorial_deepspeed.md and docs/seeds/hello_deepspeed.md, run in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.commands.guides import blocks, run_commands
from tests.helpers.ranks import free_port
from tests.seeds.hello_deepspeed.runs import experiments, steps

TUTORIAL, PAGE = ("tutorial_deepspeed.md", "seeds/hello_deepspeed.md")
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


@pytest.mark.slow
@pytest.mark.full
def test_003_5_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "numactl").write_text(NUMACTL)
    (tmp_path / "bin" / "numactl").chmod(0o755)
    small = "tools/runs/zero_table.py --num-layers 1 --hidden-size 32 --steps 2"
    commands = "\n".join(blocks(TUTORIAL)).replace("tools/runs/zero_table.py", small) + "\n".join(blocks(PAGE))
    head = f'export PATH="{tmp_path}/bin:$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1\n'
    out, _ = run_commands(tmp_path, head + LAUNCHERS.format(port=free_port()) + commands, examples=True)
    first, *others = experiments(tmp_path / "experiments")
    assert steps(first) == (8, 16, 20, 24, 30)
    assert len(others) >= 1
    assert [steps(folder) for folder in experiments(tmp_path / "experiment_deepspeed")][:4] == [(4,)] * 4
    plain = re.findall(r"^step 20 loss (\S+)$", out, flags=re.M)
    assert len(plain) == 2  # without DeepSpeed and with it
    assert all(float(loss) < 4.5 for loss in plain)
    assert re.search(r"^ +3 +all .* \(0\) ", out, flags=re.M)
