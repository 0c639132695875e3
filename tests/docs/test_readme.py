"""Every command in documents and launch scripts is read by the program it calls; docs/training.md really runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest

import pretrain_bert
from campaigns.run import CampaignFlags
from examples.hello_deepspeed.flags import HelloDeepSpeedEngineFlags
from megatron.config import ConfigSection, RunRequest, parse, parse_flags
from megatron.config.flags.fields import flags_of
from megatron.config.parse import field_flags
from megatron.config.program_flags import parse_over, read_program
from megatron.config.sampling_flags import BeamFlags
from tests.helpers.commands.recording_shell import recorded
from tests.helpers.programs import forking_python
from tools.runs.plan import PlanFlags
from train_on_text import OwnTextFlags
from trident.plan.requests import read_planned

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/coming_from/megatron_deepspeed.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")),
)
# Every command of these is run, by the test beside each.
RUN_BY_THEIR_GUIDES = {
    "docs/coming_from/gpt_neox.md": "docs/test_documents.py",  # which reads the file of flags that the page writes
    "docs/kernels.md": "tools/test_build_kernels.py",
    "docs/evaluation.md": "docs/guides/test_evaluation_guide.py",
    "docs/finetuning.md": "docs/guides/test_finetuning_guide.py",
    "docs/generation.md": "docs/guides/test_generation_guide.py",
    "docs/launching.md": "docs/guides/test_launching_guide.py",
    "docs/masked_language_models.md": "docs/guides/test_masked_guide.py",
    "docs/prefix_lm.md": "docs/guides/test_prefix_guide.py",
    "docs/recipes.md": "docs/test_recipes_guide.py",
    "docs/serving.md": "docs/guides/test_serving_guide.py",
    "docs/tutorial_deepspeed.md": "seeds/hello_deepspeed/test_003_5.py",
    "docs/watching_a_run.md": "docs/guides/test_watching_guide.py",
}
LAUNCH_SCRIPTS = ("examples/slurm/pretrain_gpt.slurm",)
SHELL_FILES = (
    *LAUNCH_SCRIPTS,
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.sh")),
    "examples/slurm/pretrain.slurm",
    "examples/slurm/preprocess.slurm",
    "examples/slurm/merge_shards.slurm",
    "tests/trident/launch/install_schedulers.sh",
    "benchmarks/gpu/run.sh",
    "examples/turkish/run.sh",
    "tests/run.sh",
    "tests/check.sh",
    "tests/other_pythons.sh",
    "tests/other_torches.sh",
    ".ci/run",
)


def blocks(document: str) -> str:
    """All shell blocks of a document, one after another: later ones use variables of earlier ones."""
    return "\n".join(re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(), flags=re.S))


def check(command: list[str]) -> None:
    """Lets the program's own parser read a command.

    Raises:
        ConfigError: the program would refuse it.
    """
    if command[:3] == ["python", "-m", "campaigns.run"]:
        parse_flags(CampaignFlags, command[3:], unnamed="--name")
        return
    if command[0] == "curl":  # tests/docs/guides/test_serving_guide.py runs it
        return
    if command == [
        "python",
        "-m",
        "tests.trident.convert.family_table",
    ]:  # tests/trident/convert/test_families.py runs it
        return
    for position, word in enumerate(command):
        rest = command[position + 1 :]
        if word.endswith("pretrain_gpt.py"):
            if {"--plan-only", "--dry-run-ranks"} & {*rest}:
                read_planned(rest)
                return
            parse(rest if "--config" not in rest else with_a_model_file(rest))
            return
        if word == "train_on_text.py":
            own, others = read_program(OwnTextFlags, rest, word, "", positional="--text")
            parse(
                ["--model-preset", own.model_preset or "laptop", *own.trainer_arguments(), *others], program=own.program
            )
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
            assert word in SHELL_FILES, f"{word} is not among the shell files that are checked"
            return
    assert command[:2] == ["pip", "install"], f"nobody checks this command: {command}"


def with_a_model_file(words: list[str]) -> list[str]:
    """The command line with the flags that an import would have written to `--config .../model.yaml`."""
    place = words.index("--config")
    assert words[place + 1].endswith("/model.yaml"), words[place + 1]
    network = ["--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"]
    network += ["--max-position-embeddings", "2048"]
    tokenizer = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", "tokenizer"]
    return [*words[:place], *network, *tokenizer, *words[place + 2 :]]


def check_tool(path: str, words: list[str]) -> None:
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    if path == "tools/preprocess_data_many_cores.py":  # takes the flags of its sibling
        module = importlib.import_module("tools.preprocess_data")
    found = [
        value
        for value in vars(module).values()
        if dataclasses.is_dataclass(value)
        and isinstance(value, type)
        and issubclass(value, ConfigSection)
        and value.__module__ == module.__name__
    ]
    if len(found) > 1:  # a tool of several commands: the first word names one
        found = [section for section in found if section.__name__.lower() == f"{words[0]}flags"]
        words = words[1:]
    (flags,) = found
    if issubclass(flags, PlanFlags):  # it takes the trainer's flags for a plan, and not for a schedule
        own, others = read_program(flags, words, path, "")
        if own.devices is not None:
            read_planned([*own.trainer_arguments(), *others])
        else:
            assert not others
        return
    if hasattr(module, "parse_over"):  # it takes the trainer's flags too
        parse_over(flags, words, path)
        return
    if flags.__name__ == "CopyFlags" and not words[1].startswith("-"):  # two folders, without the names of their flags
        words = ["--load", words[0], "--save", *words[1:]]
    if words and not words[0].startswith("-"):
        names = list(flags.__annotations__)  # tools whose first flag's name may be left out; inherited flags come later
        first = "load" if path == "tools/checkpoints.py" else "input" if "input" in names else names[0]
        words = ["--" + first.replace("_", "-"), *words]
    parse_flags(flags, words)


def test_every_guide_that_runs_a_document_is_there() -> None:
    for document, guide in RUN_BY_THEIR_GUIDES.items():
        assert document in (ROOT / "tests" / guide).read_text()


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in RUN_BY_THEIR_GUIDES])
def test_every_command_of_a_document_is_understood(document: str, tmp_path: Path) -> None:
    commands = recorded(blocks(document), tmp_path)
    assert len(commands) >= blocks(document).count("python ")
    for command in commands:
        check(command)


def test_inline_commands_are_understood() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.S)
    commands = [
        found for found in re.findall(r"`([^`\n]+)`", text) if found.startswith(("python tools", "pip ", "bash "))
    ]
    assert "python tools/doctor.py" in commands
    for command in commands:
        check(command.split())


def test_readme_is_short_and_begins_with_a_text_of_ones_own() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    commands = blocks("README.md").splitlines()
    places = [commands.index(line) for line in commands if "my_text" in line and "torchrun" not in line]
    assert [commands[place].split()[1] for place in places] == [
        "train_on_text.py",
        "tools/runs/plot_run.py",
        "tools/serve.py",
        "tools/dashboard.py",
    ]
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+\.png)\)", text)
    assert pictures == ["docs/quickstart_loss.png", "docs/images/chat.png"]
    assert all((ROOT / picture).stat().st_size < 150_000 for picture in pictures)
    assert len(re.findall(r"^One H100, .*: ", text, flags=re.M)) == 1, "the figures of GPUs are on one line"


def test_the_extras_of_readme_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    found = re.search(r"\(extras: `([\w ]+)`\)", (ROOT / "README.md").read_text())
    assert found is not None
    assert found.group(1).split() == re.findall(r"^(\w+) = \[", table, flags=re.M)


def test_files_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        named = re.findall(r"`((?:examples|tools|tests|benchmarks|megatron|docs|csrc)/[\w./]+)`", text)
        if document == "docs/published_commands.md":
            named = []  # of the projects that published them
        links = re.findall(r"\]\((?!http|reference/|project/)([^)#]+)\)", text)  # those two are made with the site
        missing = [name for name in named if not (ROOT / name).exists()]
        missing += [name for name in links if not (ROOT / document).parent.joinpath(name).exists()]
        assert not missing, f"{document} names {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_that_are_named_exist(document: str) -> None:
    known = set(
        re.findall(r"^(--[\w-]+)", (ROOT / "tests" / "config" / "golden" / "flags.txt").read_text(), flags=re.M)
    )
    known |= {spelling for entry in field_flags().values() for spelling in entry.spellings}
    known |= {spelling for entry in flags_of(BeamFlags) for spelling in entry.spellings}
    known |= {spelling for entry in flags_of(HelloDeepSpeedEngineFlags) for spelling in entry.spellings}
    known |= {"--tensor-parallel-size"}  # of vLLM, in docs/other_trainers.md
    known |= {"--bind_cores_to_rank", "--num_gpus"}  # of DeepSpeed's launcher
    known |= {"--settle-seconds", "--grace-seconds"}  # of tools/launch.py
    known |= {"--shm-size", "--rdzv-endpoint"}  # of docker and torchrun
    known |= {"--extra-eval-data-path", "--from-weights"}  # of forks' branches, in docs/published_commands.md
    text = (ROOT / document).read_text()
    elsewhere = "\n".join(
        path.read_text()
        for folder in (
            "tools",
            "tools/convert",
            "tools/corpus",
            "tools/runs",
            "tasks",
            "tasks/eval_harness",
            "examples",
            "tests",
            "tests/config/published",
            "trident/launch",
        )
        for path in (ROOT / folder).glob("*")
        if path.is_file()
    )
    for name in set(re.findall(r"`(--[a-z][a-z0-9_-]+)", text)):
        field = name.removeprefix("--").replace("-", "_")
        positive = name.replace("--no-", "--")
        assert {name, positive, positive.replace("--", "--no-", 1)} & known or re.search(
            rf"\b{field}\b|{name}", elsewhere
        ), name


@pytest.mark.parametrize("script", SHELL_FILES)
def test_shell_files_are_well_formed(script: str) -> None:
    checked = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("script", LAUNCH_SCRIPTS)
def test_launch_scripts_start_what_the_trainer_understands(script: str, tmp_path: Path) -> None:
    config = launched(script, tmp_path, "--exit-interval", "1")
    assert config.stopping.exit_interval == 1, "further flags are passed on"
    assert config.loading.load == config.saving.save, "a second start goes on"


def launched(script: str, folder: Path, *flags: str, **variables: str) -> RunRequest:
    """The configuration that a script starts the trainer with."""
    text = (ROOT / script).read_text().replace("${BASH_SOURCE[0]}", str(ROOT / script))
    (command,) = [
        words
        for words in recorded(text, folder, *flags, **variables)
        if any("pretrain_gpt.py" in word for word in words)
    ]
    return parse(command[command.index("pretrain_gpt.py") + 1 :])


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (75, True), (77, False)])
def test_slurm_requeues_the_job_when_it_is_resumable(code: int, requeued: bool, tmp_path: Path) -> None:
    text = (ROOT / "examples/slurm/pretrain_gpt.slurm").read_text().replace('exit "$code"', 'echo "$code" >code')
    commands = recorded(text, tmp_path, SLURM_JOB_ID="4711", SLURM_SUBMIT_DIR=str(tmp_path), STAND_IN_CODE=str(code))
    assert (["scontrol", "requeue", "4711"] in commands) is requeued
    assert (tmp_path / "code").read_text().strip() == str(code)


def test_make_targets_call_what_exists(tmp_path: Path) -> None:
    for line in re.findall(r"^\t(.+)$", (ROOT / "Makefile").read_text(), flags=re.M):
        for command in recorded(line, tmp_path):
            check(command)


@pytest.mark.slow
def test_the_commands_of_the_training_page_work(tmp_path: Path) -> None:
    """Runs the data, training and generation blocks unchanged, except for a smaller network and fewer steps."""
    for name in ("tools", "pretrain_gpt.py", "megatron", "trident"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = blocks("docs/training.md")
    data, train, resume, chat, generate = (
        re.search(pattern, text, flags=re.S).group(0)
        for pattern in (
            r"mkdir -p data.*?--workers 2\n",
            r"TOKENS=\(--data-path.*?--run-dir runs/demo\n",
            r"torchrun --nproc-per-node 4.*?--train-iters 300\n",
            r"printf '\{\"prompt\".*?chat.py [^\n]*\n",
            r"python tools/generate_samples_gpt.py.*?--out-seq-length 40\n",
        )
    )
    small = "--hidden-size 32 --num-layers 2 --ffn-hidden-size 64 --eval-iters 1 --log-interval 1 --save-interval 2"
    program = "\n".join(
        [
            "set -euo pipefail",
            f'python() {{ "{forking_python()}" "$@"; }}',
            f'torchrun() {{ "{forking_python()}" -m torch.distributed.run --master-addr 127.0.0.1 "$@"; }}',
            data,
            train.rstrip() + f" {small} --train-iters 2",
            resume.rstrip() + f" {small} --train-iters 3",
            chat.replace("--epochs 40", f"--epochs 1 {small}").replace("--greedy", "--greedy --max-new-tokens 3"),
            generate.replace("--top_p 0.9", "--top_p 0.9 --out-seq-length 5"),
        ]
    )
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert "iteration        3/       3" in finished.stdout
    assert "iter_0000002: iteration 2" in finished.stderr, "the second command resumes the first"
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    assert "iteration        1/       1" in finished.stdout, "fine-tuning begins anew"
    assert len((tmp_path / "prompts.txt.out").read_text().splitlines()) == 2
