"""`examples/chat.sh`: its commands, its data, and how it ends; the whole of it takes minutes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import parse, parse_flags
from megatron.config.program_flags import parse_over
from tests.helpers.commands.recording_shell import recorded
from tools.chat import ChatFlags
from tools.corpus.build_demo_corpus import DemoCorpusFlags
from tools.evaluate import EvaluateFlags
from tools.preprocess_data import PreprocessFlags
from tools.train_tokenizer import TrainTokenizerFlags
from trident.evaluate.tasks.tasks_file import read_tasks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = (EXAMPLES / "chat.sh").read_text()


def commands(folder: Path) -> dict[str, list[list[str]]]:
    """What the script starts, by program, with the arguments after it."""
    text = SCRIPT.replace("prepare_environment plot", "PYTHON=python")
    text = text.replace('cd "$(dirname "${BASH_SOURCE[0]}")/.."', f'cd "{EXAMPLES.parent}"')
    found: dict[str, list[list[str]]] = {}
    for words in recorded(text, folder, str(folder / "work")):
        program = next((word for word in words if word.endswith(".py")), "-")
        found.setdefault(program, []).append(words[words.index(program) + 1 :])
    return found


def test_every_command_is_one_that_the_programs_take(tmp_path: Path) -> None:
    found = commands(tmp_path)
    for program, cls in (
        ("tools/corpus/build_demo_corpus.py", DemoCorpusFlags),
        ("tools/train_tokenizer.py", TrainTokenizerFlags),
        ("tools/preprocess_data.py", PreprocessFlags),
    ):
        (words,) = found.pop(program)
        parse_flags(cls, words, prog=program)
    (words,) = found.pop("tools/evaluate.py")
    assert [task.title for task in read_tasks(EXAMPLES.parent / parse_over(EvaluateFlags, words, "e").flags.tasks)] == [
        "training questions",
        "other words",
    ]
    (words,) = found.pop("tools/chat.py")
    assert parse_over(ChatFlags, words, "chat.py").flags.greedy
    pretraining, tuning = (parse(words) for words in found.pop("pretrain_gpt.py"))
    assert set(found) == {"-"}
    assert pretraining.model == tuning.model and not pretraining.loading.finetune
    assert tuning.loading.finetune and tuning.loading.load == pretraining.saving.save
    assert tuning.finetuning.epochs and tuning.finetuning.pack_examples and tuning.loss.loss_on_targets_only


@pytest.mark.parametrize(("right", "code"), [(0.95, 0), (0.9499, 1)])
def test_it_fails_below_ninety_five_percent(right: float, code: int, tmp_path: Path) -> None:
    (verdict,) = re.findall(r"<<'PY'\n(.*?)\nPY\n", SCRIPT, flags=re.S)
    tasks = [{"name": name, "figures": {"exact_match": right}} for name in ("training questions", "other words")]
    (tmp_path / "results.json").write_text(json.dumps({"tasks": tasks}))
    words = [sys.executable, "-c", verdict, str(tmp_path / "results.json"), "0.95"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert f"right answers: {right:.1%} of the training questions" in done.stdout
    assert ("error: fewer than 95% of the training questions" in done.stderr) == bool(code)
