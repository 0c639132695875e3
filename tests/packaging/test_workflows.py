"""The workflows of `.github`: every command and module in them exists, and every job ends."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from campaigns.run import CAMPAIGNS
from tests.helpers.campaign_cases import DEFAULT_CASES
from tests.helpers.suite.selection import add_options

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
INSTALLED_THERE = {"build"}


def jobs(path: Path) -> dict[str, Any]:
    tree = yaml.safe_load(path.read_text())
    return dict(tree["jobs"])


def commands(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_exist_and_jobs_are_bounded(path: Path) -> None:
    for name, job in jobs(path).items():
        assert job["timeout-minutes"] <= 240, name
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@(v\d[\d.]*|release/v\d)", step["uses"]), step
    for command in commands(path):
        assert shutil.which("bash"), "the syntax is checked by bash"
        text = re.sub(r"\$\{\{.*?\}\}", "VALUE", command)
        checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        for script in re.findall(r"\bbash (\S+)", command):
            assert (ROOT / script).is_file(), script
        for module in set(re.findall(r"\bpython3? -m (\S+)", command)) - INSTALLED_THERE:
            assert importlib.util.find_spec(module), module


def test_options_of_the_suite_exist() -> None:
    used = {word for path in WORKFLOWS for command in commands(path) if "run.sh" in command for word in command.split()}
    parser = pytest.Parser(_ispytest=True)
    add_options(parser)
    known = {name for group in parser._groups for option in group.options for name in option.names()}
    known.update(re.findall(r"^ +(--\w+)\)", (ROOT / "tests" / "run.sh").read_text(), flags=re.M))
    assert {word for word in used if word.startswith("--")} <= known


def test_every_campaign_runs_nightly() -> None:
    cases = jobs(WORKFLOWS[0])["campaign"]["strategy"]["matrix"]["include"]
    assert [case["name"] for case in cases] == list(CAMPAIGNS)
    assert all(0 < case["cases"] <= CAMPAIGNS[case["name"]].cases for case in cases)


def test_cases_marked_campaign_run_nightly() -> None:
    linux = jobs(WORKFLOWS[0])["all"]["strategy"]["matrix"]["include"][0]
    assert linux["arguments"] == f"--cases {DEFAULT_CASES + 1}"
