"""No file is opened for reading but through `megatron/files`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
_LIBRARIES = {"memmap", "fromfile", "genfromtxt", "loadtxt", "safe_open", "from_file"}
_PATH_METHODS = {"read_text", "read_bytes"}
# Files that read without the opener, and why that is safe.
ALLOWED = {
    "megatron/files/plain.py": "the opener",
    "megatron/checkpoint/storage.py": "refuses links as well",
    "megatron/checkpoint/lock.py": "refuses links as well, and never waits",
    "trident/convert/megatron_output/torch_output.py": "maps a file that it has made",
    "trident/corpus/preprocess/merge.py": "opens files that it has made, to write into them",
    "trident/corpus/stores/inspection.py": "/proc",
    "trident/corpus/workers/pipes.py": "/proc",
    "megatron/cuda_driver.py": "a file of the torch package",
    "megatron/files/replacing.py": "syncs a folder",
    "trident/serve/web.py": "a file of the package",
    "megatron/kernels/native/library.py": "libraries that are executed when they are loaded",
    "trident/dashboard/server.py": "files of the package",
    "megatron/parallel/rank_start.py": "/proc",
    "megatron/parallel/processes.py": "/proc",
    "megatron/processor.py": "/proc",
    "megatron/tokenizers/encoders/fast_encoder.py": "/proc",
    "docs/site/hooks.py": "files of the repository",
    "docs/site/project_files.py": "files of the repository",
}


def unguarded(text: str) -> list[str]:
    """The calls in a source text that open a file for reading by themselves."""
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(ast.parse(text)) if _opens(node)]


def _opens(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    words = [ast.unparse(value).strip("'\"") for value in [*node.args, *(key.value for key in node.keywords)]]
    if isinstance(node.func, ast.Name):
        return (node.func.id == "open" and _reads(words[1:2])) or node.func.id in _LIBRARIES
    if not isinstance(node.func, ast.Attribute):
        return False
    name, owner = node.func.attr, ast.unparse(node.func.value)
    if name in _PATH_METHODS | _LIBRARIES:
        return True
    if name == "open" and owner == "os":
        return "O_WRONLY" not in " ".join(words) and "O_RDWR" not in " ".join(words) and "flags" not in words
    return name == "open" and all(set(word) <= set("rbt+") and word for word in words[:1]) and bool(words)


def _reads(modes: list[str]) -> bool:
    return not modes or not set(modes[0]) & set("wax")


@pytest.mark.parametrize(
    "line",
    [
        "open(path)", "open(path, 'rb', buffering=0)", "Path(path).open('rb')", "path.read_text()", "path.read_bytes()",
        "np.memmap(path)", "os.open(path, os.O_RDONLY)", "open(path, encoding='utf-8')",
    ],
)  # fmt: skip
def test_a_naive_open_is_found(line: str) -> None:
    assert unguarded(f"def read(path):\n    return {line}\n")


def test_every_other_file_is_read_through_the_opener() -> None:
    patterns = ("megatron/**/*.py", "trident/**/*.py", "tools/**/*.py", "tasks/**/*.py", "docs/site/**/*.py", "*.py")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    calls = {path.relative_to(ROOT).as_posix(): unguarded(path.read_text(encoding="utf-8")) for path in paths}
    wrong = {name: lines for name, lines in calls.items() if lines and name not in ALLOWED}
    assert not wrong, "open these with megatron.files.plain: " + str(wrong)
    assert not [name for name in ALLOWED if not calls[name]], "these need no exemption any more"
