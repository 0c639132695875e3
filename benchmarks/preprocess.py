"""Speed and memory of tools/preprocess_data.py, next to the raw rate of the tokenizer library on the same file.

    python benchmarks/preprocess.py --megabytes 50

One JSON line a figure. The raw rate is `gigatoken.encode_files` on the whole file, in memory and on all cores, without
the time to load the tokenizer; ours is from the start of the command until both files are published.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config.flags import Area, flag, parse_flags

ROOT = Path(__file__).resolve().parent.parent
_GPT2 = ROOT.parent / "shared" / "data"
_SAMPLE_SECONDS = 0.01
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
class BenchmarkFlags(Area):
    """What this benchmark asks for."""

    megabytes: float = flag(
        50.0, "size of the corpus (1 MB = 10^6 bytes), made from installed Python sources", at_least=10.0
    )
    workers: int = flag(os.cpu_count() or 1, "processes of the tool", at_least=1)
    repeats: int = flag(3, "runs of each; the fastest counts", at_least=1)
    input: str | None = flag(None, "a jsonl file to use instead of the made one")
    vocab_file: str | None = flag(
        None, "vocabulary; GPT-2's from ../shared/data if there, else one is trained", spelled=("--vocab",)
    )
    merge_file: str | None = flag(None, "merges that belong to the vocabulary", spelled=("--merge",))
    folder: str | None = flag(None, "where the temporary files go; the system's place if unset")


def main() -> int:
    """Runs the benchmark and prints its figures."""
    flags = parse_flags(BenchmarkFlags, sys.argv[1:], prog="preprocess.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        folder = Path(name)
        corpus = Path(flags.input) if flags.input else _corpus(folder / "corpus.jsonl", int(flags.megabytes * 1e6))
        vocab_file, merge_file = _vocabulary(flags, folder)
        megabytes = corpus.stat().st_size / 1e6
        raw: list[float] = []
        raw_cpu: list[float] = []
        ours: list[float] = []
        ours_cpu: list[float] = []
        peaks: list[float] = []
        for _ in range(flags.repeats):
            seconds, used, raw_tokens = _raw(vocab_file, merge_file, corpus)
            raw.append(seconds)
            raw_cpu.append(used)
            used_before = _cpu_of_children()
            seconds, peak, tokens = _ours(vocab_file, merge_file, corpus, folder / "out", flags.workers)
            ours.append(seconds)
            ours_cpu.append(_cpu_of_children() - used_before)
            peaks.append(peak)
            if tokens != raw_tokens:
                log.error(f"The tool wrote {tokens} tokens; the library alone counted {raw_tokens}.")
                return 1
    common = {
        "benchmark": "preprocess",
        "megabytes": round(megabytes, 1),
        "workers": flags.workers,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    for figure, value, unit in (
        ("raw_library_rate", megabytes / min(raw), "MB/s"),
        ("tool_rate", megabytes / min(ours), "MB/s"),
        ("ratio_to_raw_library", min(raw) / min(ours), "ratio"),
        ("raw_library_cpu", min(raw_cpu) / megabytes * 1e3, "core-ms/MB"),
        ("tool_cpu", min(ours_cpu) / megabytes * 1e3, "core-ms/MB"),
        ("peak_memory_of_all_processes", max(peaks), "MB"),
        ("tool_seconds", min(ours), "s"),
    ):
        print(json.dumps({**common, "figure": figure, "value": round(value, 3), "unit": unit}), flush=True)
    return 0


def _corpus(path: Path, wanted_bytes: int) -> Path:
    """Installed sources as jsonl, repeated where they do not suffice."""
    from megatron.corpus.demo import write_demo_corpus

    size = write_demo_corpus(path, wanted_bytes).size_bytes
    with path.open("rb") as source, path.open("ab") as end:
        while size < wanted_bytes:
            source.seek(0)
            remaining = min(size, wanted_bytes - size)
            for line in source:
                if remaining <= 0:
                    break
                end.write(line)
                size += len(line)
                remaining -= len(line)
    return path


def _vocabulary(flags: BenchmarkFlags, folder: Path) -> tuple[Path, Path]:
    if flags.vocab_file and flags.merge_file:
        return Path(flags.vocab_file), Path(flags.merge_file)
    if (_GPT2 / "gpt2-vocab.json").is_file():
        return _GPT2 / "gpt2-vocab.json", _GPT2 / "gpt2-merges.txt"
    corpus = _corpus(folder / "sample.jsonl", 10_000_000)
    words = ["--input", str(corpus), "--vocab-size", "16384", "--output-prefix", str(folder / "trained")]
    subprocess.run([sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), *words], check=True)
    return folder / "trained-vocab.json", folder / "trained-merges.txt"


def _cpu_of_children() -> float:
    """Processor seconds of all processes that this one started and that have ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _raw(vocab_file: Path, merge_file: Path, corpus: Path) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and tokens of the library alone."""
    words = [sys.executable, "-c", _RAW, str(vocab_file), str(merge_file), str(corpus)]
    seconds, used, tokens = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return seconds, used, tokens


def _ours(vocab_file: Path, merge_file: Path, corpus: Path, prefix: Path, workers: int) -> tuple[float, float, int]:
    """Seconds, peak memory in MB (the processes' resident memory, shared pages counted for each) and tokens written."""
    words = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus)]
    words += ["--output-prefix", str(prefix), "--tokenizer-type", "GPT2BPETokenizer", "--workers", str(workers)]
    words += ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
    peak = 0
    start = time.perf_counter()
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(_SAMPLE_SECONDS)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    tokens = Path(f"{prefix}_text_document.bin").stat().st_size // 2
    for suffix in ("bin", "idx"):
        Path(f"{prefix}_text_document.{suffix}").unlink()
    return seconds, peak / 1e6, tokens


def _tree_bytes(pid: int) -> int:
    """Resident memory of a process and its children, where /proc says it; else 0."""
    total = 0
    for one in (pid, *_children(pid)):
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            continue
    return total


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    log.exit_with(main)
