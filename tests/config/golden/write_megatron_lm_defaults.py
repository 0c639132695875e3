"""Writes the defaults of Megatron-LM's flags that are flags here too, from a checkout of NVIDIA/Megatron-LM:

    python -m tests.config.golden.write_megatron_lm_defaults FOLDER

Its parser is built in a process of its own, since its package has the name of ours; Triton, which it imports and no
flag needs, is replaced by an object that takes everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatron.config.parse import field_flags

DEFAULTS = Path(__file__).with_name("megatron_lm_defaults.txt")
_DUMP = """
import argparse, importlib.abc, importlib.machinery, json, sys, typing, typing_extensions
from unittest.mock import MagicMock
import torch, torch.utils.flop_counter, torch._dynamo, torch._inductor.compile_fx  # with the Triton that there is

class Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None
    def create_module(self, spec):
        module = MagicMock()
        module.__path__, module.__spec__, module.__name__, module.__version__ = [], spec, spec.name, "3.5.0"
        return module
    def exec_module(self, module):
        pass

sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, Triton())
typing.override = typing_extensions.override
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
known = {}
for action in parser._actions:
    is_switch = action.nargs == 0 and action.default is not None
    known.update(dict.fromkeys(action.option_strings, "switch" if is_switch else action.default))
print(json.dumps(known, default=str))
"""


def main(folder: str) -> None:
    """Writes one line a flag: its name, and its default as JSON, or "switch" where nothing is set without it."""
    shown = subprocess.run(
        [sys.executable, "-c", _DUMP, folder], cwd=folder, capture_output=True, text=True, check=True
    )
    theirs = json.loads(shown.stdout.splitlines()[-1])
    spelled = [text for flag in field_flags().values() for text in flag.spellings if text in theirs]
    DEFAULTS.write_text("".join(f"{text} {json.dumps(theirs[text])}\n" for text in spelled), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
