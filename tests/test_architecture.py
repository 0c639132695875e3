"""Holds the house rules: every file of the project is read, and every rule shows on a snippet that it can fail."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import house_rules
from tests.helpers.house_rules import RULES, Rule, Source

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("megatron/**/*.py", "tools/*.py", "pretrain_*.py", "examples/*.py")
EVERYTHING = (*PRODUCT, "benchmarks/**/*.py", "tests/**/*.py", "setup.py")
MEASURED_EVERYWHERE = (house_rules.files_and_functions_are_short, house_rules.no_global)

# One offending file for each rule: the path it would have, its text, and what the rule must say.
OFFENDERS: tuple[tuple[Rule, str, str, str], ...] = (
    (house_rules.imports_only_to_the_left, "megatron/data/x.py", "import megatron.train.loop", "data imports train"),
    (house_rules.imports_only_to_the_left, "megatron/data/x.py", "from megatron import train", "data imports train"),
    (
        house_rules.imports_only_to_the_left,
        "megatron/inference/x.py",
        "def f():\n    from megatron.train import loop",
        "inference imports train",
    ),
    (
        house_rules.imports_only_to_the_left,
        "megatron/train/x.py",
        "from megatron.inference import a",
        "not stand to its left",
    ),
    (house_rules.imports_only_to_the_left, "megatron/train/x.py", "from megatron.corpus import a", "only tools may"),
    (house_rules.imports_only_to_the_left, "megatron/train/x.py", "from . import loop", "relative import"),
    (house_rules.imports_only_to_the_left, "megatron/train/x.py", "import pretrain_gpt", "imports the program"),
    (house_rules.imports_only_to_the_left, "megatron/train/x.py", "import tests.helpers", "imports its tests"),
    (house_rules.imports_only_to_the_left, "megatron/attic.py", "import megatron.log", "is no room"),
    (
        house_rules.subpackages_import_only_to_the_left,
        "megatron/data/formats/x.py",
        "from megatron.data.order.plan import DataPlan",
        "formats imports order",
    ),
    (
        house_rules.subpackages_import_only_to_the_left,
        "megatron/data/datasets/x.py",
        "from megatron.data import loader",
        "datasets imports .,",
    ),
    (
        house_rules.subpackages_import_only_to_the_left,
        "megatron/corpus/cleaning/filters/x.py",
        "import megatron.corpus.cleaning.near_duplicates.index",
        "filters imports near_duplicates",
    ),
    (house_rules.one_place_per_foreign_thing, "megatron/data/x.py", "import argparse", "argparse"),
    (house_rules.one_place_per_foreign_thing, "tools/x.py", "from argparse import ArgumentParser", "argparse"),
    (house_rules.one_place_per_foreign_thing, "megatron/train/x.py", "from deepspeed import comm", "deepspeed"),
    (
        house_rules.one_place_per_foreign_thing,
        "megatron/train/x.py",
        "import torch\ntorch.cuda.synchronize()",
        "torch.cuda",
    ),
    (
        house_rules.one_place_per_foreign_thing,
        "megatron/train/x.py",
        "import torch as t\nt.cuda.empty_cache()",
        "torch.cuda",
    ),
    (
        house_rules.one_place_per_foreign_thing,
        "megatron/model/x.py",
        "import torch.distributed as dist",
        "torch.distributed",
    ),
    (
        house_rules.one_place_per_foreign_thing,
        "megatron/model/x.py",
        "from torch import distributed",
        "torch.distributed",
    ),
    (house_rules.one_place_per_foreign_thing, "megatron/train/x.py", "import os\nos.environ['A']", "os.environ"),
    (house_rules.one_place_per_foreign_thing, "tools/x.py", "from os import getenv", "os.getenv"),
    (house_rules.one_place_per_foreign_thing, "megatron/train/x.py", "import sys\nsys.exit(1)", "sys.exit"),
    (house_rules.one_place_per_foreign_thing, "megatron/checkpoint/x.py", "import pickle", "pickle"),
    (
        house_rules.one_place_per_foreign_thing,
        "megatron/checkpoint/x.py",
        "import torch\ntorch.load('a')",
        "torch.load",
    ),
    (
        house_rules.one_place_per_foreign_thing,
        "megatron/parallel/x.py",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "all_gather_object pickles",
    ),
    (
        house_rules.one_place_per_foreign_thing,
        "megatron/parallel/x.py",
        "from torch.distributed import broadcast_object_list",
        "broadcast_object_list pickles",
    ),
    (house_rules.one_place_per_foreign_thing, "megatron/data/x.py", "np.load('a', allow_pickle=True)", "allow_pickle"),
    (house_rules.one_place_per_foreign_thing, "tools/x.py", "import os\nos.system('ls')", "os.system"),
    (house_rules.no_global, "megatron/log.py", "def f():\n    global A\n    A = 1", "global A"),
    (house_rules.no_print, "megatron/train/x.py", "print(1)", "print"),
    (house_rules.no_print, "megatron/train/x.py", "import sys\nsys.stdout.write('a')", "sys.stdout"),
    (house_rules.no_mutable_module_state, "megatron/train/x.py", "seen = []", "seen is a mutable value"),
    (
        house_rules.no_mutable_module_state,
        "megatron/train/x.py",
        "seen: dict = collections.defaultdict(int)",
        "seen is",
    ),
    (
        house_rules.no_mutable_module_state,
        "megatron/train/x.py",
        "_SEEN = {}\ndef f():\n    _SEEN['a'] = 1",
        "changed here",
    ),
    (
        house_rules.no_mutable_module_state,
        "megatron/train/x.py",
        "_SEEN = set()\ndef f():\n    _SEEN.add(1)",
        "changed here",
    ),
    (
        house_rules.no_mutable_module_state,
        "megatron/train/x.py",
        "_STATE = State()\ndef f():\n    _STATE.a = 1",
        "changed here",
    ),
    (house_rules.no_mutable_module_state, "megatron/train/x.py", "def f(a=[]):\n    pass", "mutable default"),
    (house_rules.no_hidden_code, "megatron/train/x.py", "eval('1')", "eval"),
    (house_rules.no_hidden_code, "tools/x.py", "exec('1')", "exec"),
    (house_rules.no_hidden_code, "tools/x.py", "subprocess.run('ls', shell=True)", "shell=True"),
    (house_rules.files_and_functions_are_short, "megatron/train/x.py", "a = 1\n" * 501, "501 lines"),
    (house_rules.files_and_functions_are_short, "tests/x.py", "def f():\n" + "    a = 1\n" * 80, "f has 81 lines"),
    (house_rules.imports_stand_at_the_top, "megatron/train/x.py", "def f():\n    import json", "f imports json"),
    (house_rules.imports_stand_at_the_top, "megatron/train/x.py", "def f():\n    import wandb", "f imports wandb"),
    (house_rules.entry_points_start_light, "pretrain_gpt.py", "import torch", "torch at the top"),
    (
        house_rules.entry_points_start_light,
        "tools/x.py",
        "from megatron.data.formats.indexed import A",
        "megatron.data.formats.indexed at the top",
    ),
    (house_rules.entry_points_start_light, "tools/x.py", "if True:\n    import numpy", "numpy at the top"),
    (house_rules.config_is_pure, "megatron/config/x.py", "import numpy", "config imports numpy"),
    (house_rules.config_is_pure, "megatron/config/x.py", "def f():\n    import torch", "config imports torch"),
    (house_rules.names_are_whole_words, "megatron/train/x.py", "def f(args):\n    pass", "args"),
    (house_rules.names_are_whole_words, "megatron/train/x.py", "model_cfg = 1", "model_cfg"),
    (house_rules.names_are_whole_words, "megatron/train/x.py", "class SignalHandler:\n    pass", "SignalHandler"),
    (house_rules.names_are_whole_words, "megatron/train/utils.py", "", "file or folder name utils"),
    (house_rules.everything_public_is_described, "megatron/train/x.py", "", "module has no docstring"),
    (
        house_rules.everything_public_is_described,
        "megatron/train/x.py",
        '"""A."""\ndef f():\n    pass',
        "f has no docstring",
    ),
    (
        house_rules.everything_public_is_described,
        "megatron/train/x.py",
        '"""A."""\nclass A:\n    """A."""\n    def f(self):\n        pass',
        "A.f has no docstring",
    ),
    (house_rules.nothing_is_asserted, "megatron/train/x.py", "assert 1", "assert"),
    (house_rules.rooms_open_without_side_effects, "megatron/train/__init__.py", "import a\na.go()", "only imports"),
    (house_rules.few_see_the_whole, "megatron/train/x.py", "from megatron.config import RunConfig", "RunConfig"),
    (house_rules.the_model_knows_little, "megatron/model/x.py", "from megatron.config import DataConfig", "DataConfig"),
)

# What must stay allowed: a rule that forbids too much is as wrong as one that forbids nothing.
INNOCENT: tuple[tuple[str, str], ...] = (
    ("megatron/engine/x.py", '"""A."""\nimport deepspeed\nfrom megatron.parallel.mesh import Axis'),
    ("megatron/parallel/x.py", '"""A."""\nimport torch.distributed as dist\ndist.all_reduce(1)'),
    (
        "megatron/train/x.py",
        '"""A."""\nNAMES = {"a": 1}\n\ndef _f(seen):\n    seen.append(NAMES["a"])\n    model.eval()',
    ),
    (
        "tools/x.py",
        '"""A."""\nfrom megatron.config.flags.command_line import flag\ndef _f():\n    import torch\n    print(torch)',
    ),
    ("megatron/data/loader.py", '"""A."""\nfrom megatron.data.datasets import sample'),
    ("megatron/data/order/x.py", '"""A."""\nfrom megatron.data.formats.sidecar import a'),
    ("megatron/tokenizers/gpt2.py", '"""A."""\ndef _f():\n    import tokenizers'),
)


@cache
def sources(patterns: tuple[str, ...]) -> tuple[Source, ...]:
    """Every file that matches, parsed."""
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    return tuple(Source.of(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_holds(rule: Rule) -> None:
    files = sources(EVERYTHING if rule in MEASURED_EVERYWHERE else PRODUCT)
    findings = [f"{source.path}:{line}: {text}" for source in files for line, text in rule(source)]
    assert not findings, f"{rule.__doc__}\n" + "\n".join(findings)


@pytest.mark.parametrize(("rule", "path", "text", "says"), OFFENDERS)
def test_each_rule_can_fail(rule: Rule, path: str, text: str, says: str) -> None:
    sentences = [sentence for _, sentence in rule(Source.of(path, text))]
    assert any(says in sentence for sentence in sentences), f"{rule.__name__} said {sentences}"


def test_no_rule_is_without_an_offender() -> None:
    assert {rule for rule, *_ in OFFENDERS} == set(RULES)


@pytest.mark.parametrize(("path", "text"), INNOCENT)
def test_what_is_allowed_stays_allowed(path: str, text: str) -> None:
    source = Source.of(path, text)
    assert [sentence for rule in RULES for _, sentence in rule(source)] == []


def test_the_files_are_found() -> None:
    paths = {source.path for source in sources(EVERYTHING)}
    assert {
        "pretrain_gpt.py",
        "megatron/log.py",
        "megatron/config/flags/command_line.py",
        "tests/test_architecture.py",
    } <= paths


def test_every_room_says_what_lives_there() -> None:
    rooms = [path for path in (ROOT / "megatron").iterdir() if path.is_dir() and any(path.glob("*.py"))]
    missing = [room.name for room in rooms if not (room / "__init__.py").is_file()]
    assert not missing, f"rooms without __init__.py: {missing}"
    unplaced = [room.name for room in rooms if room.name not in house_rules.ROOM_PLACES]
    assert not unplaced, f"rooms without a place among the others: {unplaced}"


def test_every_subpackage_has_a_place() -> None:
    folders = [path.parent for path in (ROOT / "megatron").glob("*/**/__init__.py")]
    parents = {folder.parent for folder in folders if folder.parent.parent != ROOT}
    found = {
        ".".join(parent.relative_to(ROOT).parts): {folder.name for folder in folders if folder.parent == parent}
        for parent in parents
    }
    assert found == {parent: set(order) - {"."} for parent, order in house_rules.SUBPACKAGE_ORDER.items()}


def test_no_folder_is_crowded() -> None:
    paths = [source.path for source in sources(("megatron/**/*.py",))]
    assert not list(house_rules.crowded_folders(paths))


def test_a_crowded_folder_is_named() -> None:
    paths = [f"megatron/data/order/file{number}.py" for number in range(16)]
    assert list(house_rules.crowded_folders(paths)) == ["megatron/data/order has 16 files; a folder has at most 15"]
    assert not list(house_rules.crowded_folders(paths[1:]))


def test_only_the_engine_needs_deepspeed() -> None:
    modules = [
        source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for source in sources(("megatron/**/*.py",))
        if source.room not in ("engine", "train")
    ]
    program = (
        "import importlib, sys\n"
        "sys.modules['deepspeed'] = None\n"
        f"[importlib.import_module(name) for name in {modules!r}]\n"
        "import torch\n"
        "sys.exit(3 if torch.distributed.is_initialized() else 0)\n"
    )
    _run_python(program)


def test_flags_are_read_without_torch_and_numpy() -> None:
    _run_python(
        "import sys\nimport megatron.config\nimport pretrain_gpt\n"
        "heavy = {'torch', 'numpy', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )


def test_the_data_side_does_without_torch() -> None:
    modules = [
        source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for source in sources(("megatron/tokenizers/*.py", "megatron/data/**/*.py", "megatron/corpus/**/*.py"))
    ]
    _run_python(
        f"import importlib, sys\nsys.modules['torch'] = None\n[importlib.import_module(name) for name in {modules!r}]\n"
    )


def _run_python(program: str) -> None:
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
