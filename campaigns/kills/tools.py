"""SIGKILL at file operations of the tools that make files: `python -m campaigns.run tool-kills --cases 260`.

In each case a tool dies before one of its operations on files. What is then visible is what was there before or what
the finished tool makes, each unit of it whole; the same command then ends with the same bytes as a run that was left
alone, or it is refused by a text that names its result and the way out, and nothing of the killed run stays.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from campaigns.campaign import Plan, Result
from megatron import process_exit
from megatron.checkpoint.lock import LOCK_NAME
from megatron.data.formats.indexed_writer import IndexedWriter
from tests.checkpoint.made.fake_pieces import make_state
from tests.checkpoint.made.stored import save_checkpoint
from tests.checkpoint.retention.checkpoints import save_step
from tests.helpers.machines.faulty_disk import FaultyDisk, faulty_disk
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tests.trident.convert.foreign.foreign_files import foreign, gpt2_arguments, write_torch_layout
from tests.trident.convert.megatron_output.networks import GPT2, write_network
from tests.trident.convert.tiny_models import write_tiny_model

Tree = Mapping[str, bytes]


@dataclass(frozen=True)
class Tool:
    """A command, with {inputs} and {work} for its two folders.

    Args:
        words: the module in `tools/` and its flags.
        depth: how many parts of a path in the working folder name something that is whole or not there.
        result: what a refusal of the second run must name.
    """

    words: str
    depth: int = 1
    result: str = ""


_TOKENIZER = "--tokenizer-type GPT2BPETokenizer --vocab-file {inputs}/%s --merge-file {inputs}/%s"
_PRETOKENIZED = _TOKENIZER % ("demo-vocab.json", "demo-merges.txt")
TOOLS: Mapping[str, Tool] = {
    "import_hf": Tool("convert/import_hf {inputs}/llama --save {work}/made", result="made"),
    "export_hf": Tool("convert/export_hf --load {inputs}/imported --output {work}/made", result="made"),
    "import_megatron": Tool(
        f"convert/import_megatron {{inputs}}/theirs --save {{work}}/made {_PRETOKENIZED}",
        result="made",
    ),
    "export_megatron-universal": Tool(
        "convert/export_megatron --load {inputs}/network/checkpoints --output {work}/made", result="made"
    ),
    "export_megatron-torch": Tool(
        "convert/export_megatron --load {inputs}/network/checkpoints --output {work}/made --format torch", result="made"
    ),
    "train_tokenizer": Tool("train_tokenizer --input {inputs}/texts.jsonl --output-prefix {work}/old --vocab-size 300"),
    "checkpoints-prune": Tool("checkpoints prune {work}/saved --keep-last 1", depth=2),
    "checkpoints-copy": Tool("checkpoints copy {inputs}/saved {work}/saved --step 9", depth=2),
    "average_checkpoints": Tool("checkpoints average {inputs}/a {inputs}/b --save {work}/mean", depth=2, result="mean"),
    "merge_preprocessed_data": Tool(
        "merge_preprocessed_data --datasets {inputs}/pair1 {inputs}/pair2 --output-prefix {work}/merged"
    ),
    "preprocess_data": Tool(
        f"preprocess_data --input {{inputs}}/texts.jsonl --output-prefix {{work}}/data {_PRETOKENIZED} --workers 1"
    ),
    "clean_corpus": Tool("corpus/clean_corpus --input {inputs}/texts.jsonl --output {work}/clean.jsonl --workers 1"),
    "build_demo_corpus": Tool("corpus/build_demo_corpus --lang tr --documents 20 --output {work}/demo.jsonl"),
}


def write_inputs(inputs: Path, before: Path) -> None:
    """Writes the input of the tools and the initial content of their working folder."""
    write_tiny_model("llama", _folder(inputs / "llama"))
    choice = write_vocabulary(inputs, 600)
    for source, name in ((choice.vocab_file, "demo-vocab.json"), (choice.merge_file, "demo-merges.txt")):
        if Path(str(source)) != inputs / name:
            shutil.copy(str(source), inputs / name)
    write_torch_layout(inputs / "theirs", foreign(gpt2_arguments(num_layers=2)))
    write_network(_folder(inputs / "network"), GPT2)
    texts = [json.dumps({"text": text}) for text in hard_documents(40)]
    (inputs / "texts.jsonl").write_text("\n".join(texts) + "\n")
    for seed, name in enumerate("ab"):
        save_checkpoint(inputs / name, make_state(seed=seed))
    for number in (1, 2):
        with IndexedWriter(str(inputs / f"pair{number}"), np.uint16) as writer:
            for document in range(5):
                writer.add_document([np.arange(document + number, dtype=np.uint16)])
    save_step(inputs / "saved", 9)
    for step in (1, 2, 3):
        save_step(before / "saved", step)
    for name in ("old-vocab.json", "old-merges.txt", "old-tokenizer.json", "demo.jsonl"):
        (before / name).write_text(f"what was in {name} before\n")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a tool: the files before and after it, and the number of its file operations."""

    before: Tree
    after: Tree
    operations: int


class Kills:
    """Kills tools in one folder, which has to keep its path: some results name it."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.before, self.work = (folder / name for name in ("inputs", "before", "work"))
        self._output = folder / "output.txt"
        self._references: dict[str, Reference] = {}
        self.inputs.mkdir()
        self.before.mkdir()
        self._in_child(functools.partial(write_inputs, self.inputs, self.before))
        code = self._run("convert/import_hf {inputs}/llama --save {inputs}/imported")
        if code or not (self.before / "saved").is_dir():
            raise RuntimeError(f"the inputs could not be made:\n{self._output.read_text()}")

    def reference(self, name: str) -> Reference:
        """Runs a tool without a kill."""
        if name not in self._references:
            self._restore()
            counted = FaultyDisk(self.work, kills=True)
            code = self._run(TOOLS[name].words, counted)
            if code:
                raise RuntimeError(f"{name} ends with {code}:\n{self._output.read_text()}")
            self._references[name] = Reference(tree_of(self.before), tree_of(self.work), counted.operations)
        return self._references[name]

    def try_operation(self, name: str, operation: int) -> tuple[str, str]:
        """Kills a tool before one of its operations and runs it again; the outcome of the rerun, and a problem."""
        tool, reference = TOOLS[name], self.reference(name)
        self._restore()
        code = self._run(tool.words, FaultyDisk(self.work, operation, kills=True))
        problem = f"was not killed but ended with {code}" if code != -signal.SIGKILL else ""
        problem = problem or half_made(tree_of(self.work), reference.before, reference.after, tool.depth)
        if problem:
            return "killed", problem
        code, text = self._run(tool.words), self._output.read_text()
        outcome = "refused: already complete" if code else "completed"
        if code:
            way_out = re.search(rf"{self.work}/{tool.result}\b.*(Remove|another folder)", text)
            if not tool.result or way_out is None or "Traceback" in text:
                return outcome, f"the rerun ends with {code}: {text[-2000:]}"
        tree, after = tree_of(self.work), reference.after
        wrong = sorted(path for path in {*tree, *after} if tree.get(path) != after.get(path))
        return outcome, f"after the rerun ({code}) these differ from an undisturbed run: {wrong[:5]}" if wrong else ""

    def _restore(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.before, self.work)

    def _run(self, words: str, disk: FaultyDisk | None = None) -> int:
        module, *flags = (word.format(inputs=self.inputs, work=self.work) for word in words.split())

        def work() -> None:
            sys.argv = [f"{module}.py", *flags]
            main = importlib.import_module(f"tools.{module.replace('/', '.')}").main
            with faulty_disk(disk or FaultyDisk(self.work)):
                process_exit.exit_with(main)

        return self._in_child(work)

    def _in_child(self, work: Callable[[], None]) -> int:
        """Runs `work` in a forked process; its exit code, or minus the number of the signal that ended it."""
        child = os.fork()
        if child == 0:
            code: object = 1
            try:
                output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                faulthandler.enable(2)
                work()
                code = 0
            except SystemExit as left:
                code = left.code or 0
            except BaseException as failure:
                os.write(2, f"Traceback: {failure!r}\n".encode())
            finally:
                os._exit(code if isinstance(code, int) else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def tree_of(folder: Path) -> Tree:
    """The files and empty folders of a folder by their relative paths, without what differs between two runs alike."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            if not any(path.iterdir()):
                found[name + "/"] = b""
        elif path.name != LOCK_NAME:
            found[name] = _normal(path)
    return found


def _normal(path: Path) -> bytes:
    """The content of a file, without the number that every save draws, and the digest over it."""
    content = path.read_bytes()
    return (
        re.sub(rb'"(run|digest|sha256_of_manifest)": ?"[0-9a-f]+"', b"", content) if path.suffix == ".json" else content
    )


def half_made(found: Tree, before: Tree, after: Tree, depth: int) -> str:
    """The paths that are visible but neither old nor new, and those lost though the tool does not touch them."""
    now, earlier, later = (_units(tree, depth) for tree in (found, before, after))
    for unit, files in now.items():
        if files != earlier.get(unit) and files != later.get(unit):
            return f"{unit} is visible and half made: {sorted(files)[:5]}"
    lost = [unit for unit, files in earlier.items() if later.get(unit) == files and now.get(unit) != files]
    return f"{lost} were there before and are not intact" if lost else ""


def _units(tree: Tree, depth: int) -> dict[str, dict[str, bytes]]:
    units: dict[str, dict[str, bytes]] = {}
    for path, content in tree.items():
        parts = path.split("/")
        is_empty_folder_of_units = parts[-1] == "" and len(parts) <= depth
        if not is_empty_folder_of_units and not any(part.startswith(".") for part in parts):
            units.setdefault("/".join(parts[:depth]), {})[path] = content
    return units


def run_cases(plan: Plan) -> Iterator[Result]:
    """Kills the tools in turn, each at a random operation."""
    names = plan.names(list(TOOLS))
    kills = Kills(plan.folder)
    for number in plan.numbers:
        name = names[number % len(names)]
        operations = kills.reference(name).operations
        operation = plan.random(number).randrange(operations)
        outcome, problem = kills.try_operation(name, operation)
        problem = problem and f"killed before operation {operation} of {operations}: {problem}"
        yield Result(number, name, outcome, problem)
