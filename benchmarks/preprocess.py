"""Speed and memory of tools/preprocess_data.py, relative to the raw rate of the tokenizer library on the same file.

    python benchmarks/preprocess.py --megabytes 50

Prints one JSON line per measurement. The raw rate is that of `gigatoken.encode_files` on the whole file, in memory and
on all cores, without loading the tokenizer; ours is measured from the start of the command until both files are in
place. Installed peers (see `preprocess_peers.py`) run on the first megabytes of the corpus, followed by ours on the
same data.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from benchmarks.installed_text import write_installed_text
from megatron import log, process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import DataError

ROOT = Path(__file__).resolve().parent.parent
_GPT2 = ROOT.parent / "shared" / "data"
_SAMPLE_SECONDS = 0.05
_RAW = """
import json, sys, time
import gigatoken
from tokenizers import Tokenizer, models, pre_tokenizers
vocab_file, merge_file, corpus = sys.argv[1:]
reference = Tokenizer(models.BPE.from_file(vocab_file, merge_file))
reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
library = gigatoken.Tokenizer.from_json(reference.to_str())
library.encode_batch(["warm"])
start, used = time.perf_counter(), time.process_time()
result = library.encode_files(gigatoken.JsonlFileSource([corpus]))
seconds, used = time.perf_counter() - start, time.process_time() - used
print(json.dumps([seconds, used, int(len(result.layout.content.data))]))
"""


@dataclass(frozen=True)
class BenchmarkFlags(ConfigSection):
    """Flags of this benchmark."""

    megabytes: float = flag(
        50.0,
        "size of the corpus (1 MB = 10^6 bytes), built from files on this machine",
        at_least=10.0,
    )
    workers: int = flag(os.cpu_count() or 1, "worker processes of the tool", at_least=1)
    peer_megabytes: float = flag(30.0, "megabytes of the corpus for the peers; 0 skips them", at_least=0.0)
    repeats: int = flag(3, "repetitions of each; the fastest counts", at_least=1)
    input: str | None = flag(None, "jsonl file to use instead of the generated one")
    vocab_file: str | None = flag(
        None, "vocabulary; by default GPT-2's if available, otherwise one is trained", spelled=("--vocab",)
    )
    merge_file: str | None = flag(None, "merges of the vocabulary", spelled=("--merge",))
    folder: str | None = flag(None, "folder for temporary files; by default the system's")


@dataclass(frozen=True)
class _Run:
    """Measurements of one run; `peak_bytes` is the total memory of all its processes."""

    seconds: float
    cpu_seconds: float
    tokens: int
    peak_bytes: int


def main() -> int:
    """Runs the benchmark and prints its figures."""
    flags = parse_flags(BenchmarkFlags, sys.argv[1:], prog="preprocess.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        folder = Path(name)
        corpus = Path(flags.input) if flags.input else folder / "corpus.jsonl"
        if not flags.input:
            write_installed_text(corpus, int(flags.megabytes * 1e6))
        vocabulary = _vocabulary(flags, folder)
        _compare_with_library(flags, corpus, vocabulary, folder)
        if flags.peer_megabytes:
            _compare_with_peers(flags, corpus, vocabulary, folder)
    return 0


def _compare_with_library(flags: BenchmarkFlags, corpus: Path, vocabulary: tuple[Path, Path], folder: Path) -> None:
    megabytes = corpus.stat().st_size / 1e6
    raws, ours = [], []
    for _ in range(flags.repeats):
        raws.append(_raw(*vocabulary, corpus))
        ours.append(_ours(*vocabulary, [corpus], folder / "out", flags.workers))
        if ours[-1].tokens != raws[-1].tokens:
            raise DataError(f"The tool wrote {ours[-1].tokens} tokens; the library alone counted {raws[-1].tokens}.")
    more = {"megabytes": round(megabytes, 1), "workers": flags.workers}
    ratios = sorted(raw.seconds / our.seconds for raw, our in zip(raws, ours, strict=True))
    _print_rate("raw_library_rate", raws, megabytes, more)
    _print_rate("tool_rate", ours, megabytes, more)
    spread = (ratios[0], ratios[-1])
    print_figure("preprocess", "ratio_to_raw_library", ratios[len(ratios) // 2], "ratio", spread=spread, **more)
    for figure, runs in (("raw_library_cpu", raws), ("tool_cpu", ours)):
        used = min(run.cpu_seconds for run in runs) / megabytes * 1e3
        print_figure("preprocess", figure, used, "core-ms/MB", **more)
    print_figure("preprocess", "peak_memory", max(run.peak_bytes for run in ours) / 1e6, "MB", **more)
    print_figure("preprocess", "longest_line", _longest_line_bytes(corpus) / 1e6, "MB", **more)


def _compare_with_peers(flags: BenchmarkFlags, corpus: Path, vocabulary: tuple[Path, Path], folder: Path) -> None:
    parts = folder / "parts"
    size = _write_parts(corpus, parts, flags.workers, int(flags.peer_megabytes * 1e6))
    tokenizer_file = folder / "tokenizer.json"
    tokenizer_file.write_text(_reference(*vocabulary).to_str())
    more = {"megabytes": round(size / 1e6, 1), "workers": flags.workers}
    for peer in ("datatrove", "tokenizers"):
        if importlib.util.find_spec(peer) is None:
            log.info(f"{peer} is not installed, so it is not measured (pip install {peer}).")
            continue
        words = [sys.executable, str(Path(__file__).with_name("preprocess_peers.py")), peer]
        words += [str(parts), str(tokenizer_file), str(flags.workers)]
        theirs = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        ours = _ours(*vocabulary, sorted(parts.glob("part*.jsonl")), folder / "out", flags.workers)
        if theirs["tokens"] != ours.tokens:
            raise DataError(f"{peer} wrote {theirs['tokens']} tokens, this tool {ours.tokens}.")
        print_figure("preprocess", f"{peer}_rate", size / 1e6 / theirs["seconds"], "MB/s", **more)
        print_figure("preprocess", f"ratio_to_{peer}", theirs["seconds"] / ours.seconds, "ratio", **more)


def _print_rate(figure: str, runs: list[_Run], megabytes: float, more: dict[str, object]) -> None:
    rates = [megabytes / run.seconds for run in runs]
    print_figure("preprocess", figure, max(rates), "MB/s", spread=(min(rates), max(rates)), **more)


def _longest_line_bytes(corpus: Path) -> int:
    with corpus.open("rb") as file:
        return max(map(len, file), default=0)


def _write_parts(corpus: Path, folder: Path, count: int, wanted_bytes: int) -> int:
    """Copies the first lines of the corpus to `count` files of about equal size; returns the number of bytes."""
    folder.mkdir()
    copied = 0
    with corpus.open("rb") as lines, ExitStack() as stack:
        files = [stack.enter_context((folder / f"part{number}.jsonl").open("wb")) for number in range(count)]
        for line in lines:
            if copied >= wanted_bytes:
                break
            copied += files[min(copied * count // wanted_bytes, count - 1)].write(line)
    return copied


def _vocabulary(flags: BenchmarkFlags, folder: Path) -> tuple[Path, Path]:
    if flags.vocab_file and flags.merge_file:
        return Path(flags.vocab_file), Path(flags.merge_file)
    if (_GPT2 / "gpt2-vocab.json").is_file():
        return _GPT2 / "gpt2-vocab.json", _GPT2 / "gpt2-merges.txt"
    corpus = folder / "sample.jsonl"
    write_installed_text(corpus, 10_000_000)
    words = ["--input", str(corpus), "--vocab-size", "16384", "--output-prefix", str(folder / "trained")]
    subprocess.run([sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), *words], check=True)
    return folder / "trained-vocab.json", folder / "trained-merges.txt"


def _cpu_of_children() -> float:
    """CPU seconds of all terminated descendants of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _reference(vocab_file: Path, merge_file: Path) -> Tokenizer:
    reference = Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return reference


def _raw(vocab_file: Path, merge_file: Path, corpus: Path) -> _Run:
    """Runs the library alone."""
    words = [sys.executable, "-c", _RAW, str(vocab_file), str(merge_file), str(corpus)]
    seconds, used, tokens = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return _Run(seconds, used, tokens, 0)


def _ours(vocab_file: Path, merge_file: Path, inputs: list[Path], prefix: Path, workers: int) -> _Run:
    words = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", *map(str, inputs)]
    words += ["--output-prefix", str(prefix), "--tokenizer-type", "GPT2BPETokenizer", "--workers", str(workers)]
    words += ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
    peak = 0
    used_before = _cpu_of_children()
    start = time.perf_counter()
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(_SAMPLE_SECONDS)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    tokens = Path(f"{prefix}_text_document.bin").stat().st_size // 2
    for suffix in ("bin", "idx", "json"):
        Path(f"{prefix}_text_document.{suffix}").unlink()
    return _Run(seconds, _cpu_of_children() - used_before, tokens, peak)


def _tree_bytes(pid: int) -> int:
    """Memory of a process and its children, with shared pages counted proportionally (PSS); 0 if unknown."""
    total = 0
    for process_id in (pid, *_children(pid)):
        try:
            lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    process_exit.exit_with(main)
