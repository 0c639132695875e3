"""The commands of docs/seeds/jax_lm_training.md, run once in their order, for the scenarios of that system."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.programs import forking_python

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "seeds" / "jax_lm_training.md"
_NEEDED = ("benchmarks", "examples", "megatron", "trident", "tools", "pretrain_gpt.py")


@dataclass(frozen=True)
class PageRun:
    """What the commands left behind and printed."""

    folder: Path
    out: str
    err: str

    def log(self, save: str) -> list[str]:
        """The lines of a training run's log file."""
        return (self.folder / save / "run" / "log.txt").read_text().splitlines()


def run_page(folder: Path) -> PageRun:
    """Runs all commands of the page in a folder."""
    for name in _NEEDED:
        (folder / name).symlink_to(ROOT / name)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.S))
    program = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{blocks}'
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return PageRun(folder, done.stdout, done.stderr)
