"""The commands of documents, launch scripts and the Makefile are read by the programs they call; nothing is run.

`tests/docs/test_guides.py` runs the pages of docs/, with --all.
"""

import dataclasses
import importlib
import re
import subprocess
from pathlib import Path

import pytest

import pretrain_bert
from megatron.config import ConfigSection, RunRequest, parse, parse_flags
from megatron.config.program_flags import parse_over, read_program
from tests.helpers.commands.recording_shell import recorded
from tools.runs.plan import PlanFlags
from train_on_text import OwnTextFlags
from trident.plan.requests import read_plan_request

ROOT = Path(__file__).resolve().parents[2]
# Pages whose later commands need files that earlier ones write, or programs of other projects; others run or read them.
READ_ELSEWHERE = (
    *("docs/coming_from/gpt_neox.md", "docs/finetuning.md", "docs/kernels.md", "docs/launching.md"),
    *("docs/prefix_lm.md", "docs/tutorial_deepspeed.md", "docs/watching_a_run.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/seeds/*.md")),
)
PAGES = [
    name
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
    if (name := path.relative_to(ROOT).as_posix()) not in READ_ELSEWHERE and "```bash" in path.read_text()
]
LAUNCH_SCRIPT = "examples/slurm/pretrain_gpt.slurm"
SHELL_FILES = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.sh")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples" / "slurm").glob("*.slurm")),
    "tests/trident/launch/install_schedulers.sh",
    "benchmarks/gpu/run.sh",
    "examples/turkish/run.sh",
    *("tests/run.sh", "tests/check.sh", "tests/other_pythons.sh", "tests/other_torches.sh", ".ci/run"),
)


def blocks(document: str) -> str:
    """All shell blocks of a document; later ones use variables of earlier ones."""
    return "\n".join(re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(), flags=re.S))


def check(command: list[str]) -> None:
    """Reads a command with the parser of its program.

    Raises:
        ConfigError: the program would refuse it.
    """
    if command[0] == "curl" or command[1:2] == ["-m"]:
        return
    for position, word in enumerate(command):
        rest = command[position + 1 :]
        if word.endswith("pretrain_gpt.py"):
            if {"--plan-only", "--dry-run-ranks"} & {*rest}:
                read_plan_request(rest)
                return
            parse(rest if "--config" not in rest else with_a_model_file(rest))
            return
        if word == "train_on_text.py":
            flags, others = read_program(OwnTextFlags, rest, word, "", positional="--text")
            preset = ["--model-preset", flags.model_preset or "laptop"]
            parse([*preset, *flags.trainer_arguments(), *others], program=flags.program)
            return
        if word.endswith("pretrain_bert.py"):
            if "--config" in rest:
                rest = [*with_a_model_file(rest), "--bert-no-binary-head"]
            parse(rest, program=pretrain_bert.PROGRAM)
            return
        if re.fullmatch(r"(tools(/\w+)?|tasks|tasks/eval_harness|benchmarks|examples|docs/site)/\w+\.py", word):
            check_tool(word, rest)
            return
        if re.fullmatch(r"[\w./]+\.(sh|slurm)", word):
            assert word in SHELL_FILES, f"{word} is not among SHELL_FILES"
            return
    assert command[:2] == ["pip", "install"], f"unknown command: {command}"


def with_a_model_file(words: list[str]) -> list[str]:
    """The command line with flags in place of the `--config .../model.yaml` that an import writes."""
    position = words.index("--config")
    assert words[position + 1].endswith("/model.yaml"), words[position + 1]
    network = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"]
    network += ["--max-position-embeddings", "2048"]
    tokenizer = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", "tokenizer"]
    return [*words[:position], *network, *tokenizer, *words[position + 2 :]]


def check_tool(path: str, words: list[str]) -> None:
    """Reads a command line with the flags that a program declares."""
    name = "tools.preprocess_data" if path == "tools/preprocess_data_many_cores.py" else path.removesuffix(".py")
    module = importlib.import_module(name.replace("/", "."))
    sections = [
        value
        for value in vars(module).values()
        if dataclasses.is_dataclass(value)
        and isinstance(value, type)
        and issubclass(value, ConfigSection)
        and value.__module__ == module.__name__
    ]
    if len(sections) > 1:  # a program with several commands
        sections = [section for section in sections if section.__name__.lower() == f"{words[0]}flags"]
        words = words[1:]
    (flags,) = sections
    if issubclass(flags, PlanFlags):  # takes the trainer's flags for a plan, but not for a schedule
        given, others = read_program(flags, words, path, "")
        if given.devices is not None:
            read_plan_request([*given.trainer_arguments(), *others])
        else:
            assert not others
        return
    if hasattr(module, "parse_over"):  # takes the trainer's flags too
        parse_over(flags, words, path)
        return
    if flags.__name__ == "CopyFlags" and not words[1].startswith("-"):  # two folders without flags
        words = ["--load", words[0], "--save", *words[1:]]
    if words and not words[0].startswith("-"):
        names = list(flags.__annotations__)  # the name of the first flag is optional; inherited flags come later
        first = "load" if path == "tools/checkpoints.py" else "input" if "input" in names else names[0]
        words = ["--" + first.replace("_", "-"), *words]
    parse_flags(flags, words)


@pytest.mark.parametrize("document", PAGES)
def test_every_command_of_a_page_is_read(document: str, tmp_path: Path) -> None:
    commands = recorded(blocks(document), tmp_path)
    assert len(commands) >= blocks(document).count("python ")
    for command in commands:
        check(command)


def test_inline_commands_of_readme_are_read() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.S)
    commands = [code for code in re.findall(r"`([^`\n]+)`", text) if code.startswith(("python tools", "pip ", "bash "))]
    assert "python tools/doctor.py" in commands
    for command in commands:
        check(command.split())


def test_the_configuration_of_the_neox_page_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = recorded(blocks("docs/coming_from/gpt_neox.md"), tmp_path)
    monkeypatch.chdir(tmp_path)
    request = parse(command[command.index("pretrain_gpt.py") + 1 :])
    assert (request.model.num_layers, request.optim.global_batch_size, request.saving.keep_last) == (12, 32, 4)
    assert request.model.position_embedding_type == "rope" and request.precision.bf16


def test_make_targets_are_read(tmp_path: Path) -> None:
    for line in re.findall(r"^\t(.+)$", (ROOT / "Makefile").read_text(), flags=re.M):
        for command in recorded(line, tmp_path):
            check(command)


@pytest.mark.parametrize("script", SHELL_FILES)
def test_shell_files_are_well_formed(script: str) -> None:
    checked = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_slurm_script_starts_the_trainer(tmp_path: Path) -> None:
    config = launched(LAUNCH_SCRIPT, tmp_path, "--exit-interval", "1")
    assert config.stopping.exit_interval == 1, "further flags are passed on"
    assert config.loading.load == config.saving.save, "a second start continues"


def launched(script: str, folder: Path, *flags: str) -> RunRequest:
    """The configuration with which a script starts the trainer."""
    text = (ROOT / script).read_text().replace("${BASH_SOURCE[0]}", str(ROOT / script))
    (command,) = [words for words in recorded(text, folder, *flags) if any("pretrain_gpt.py" in word for word in words)]
    return parse(command[command.index("pretrain_gpt.py") + 1 :])


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (77, False)])
def test_slurm_requeues_a_resumable_job(code: int, requeued: bool, tmp_path: Path) -> None:
    text = (ROOT / LAUNCH_SCRIPT).read_text().replace('exit "$code"', 'echo "$code" >code')
    commands = recorded(text, tmp_path, SLURM_JOB_ID="4711", SLURM_SUBMIT_DIR=str(tmp_path), STAND_IN_CODE=str(code))
    assert (["scontrol", "requeue", "4711"] in commands) is requeued
    assert (tmp_path / "code").read_text().strip() == str(code)
