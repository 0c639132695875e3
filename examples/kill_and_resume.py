"""A complete demonstration: preprocess text, train on four ranks, kill the run, resume on one rank, compare the losses.

    python examples/kill_and_resume.py --work-dir runs/quickstart

Trains a small GPT as 2 tensor-parallel x 2 pipeline ranks, kills the launcher (SIGKILL) some steps after a save,
resumes the checkpoint in a single process, and compares, step by step, the losses of the resumed run with those that
the killed run had logged after its last save. It ends with text that the network writes.

On GPUs the network is larger, and the first run has one rank per GPU, at most four; on the CPU, also selected by
DS_ACCELERATOR=cpu in the environment, it always has four ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags
from megatron.errors import MegatronError, StorageError

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("Return the", "This method is", "If the argument is")
EXIT_SECONDS = 10.0  # for the ranks of a killed launcher
# Summing the same numbers in a different order changes the last bits, and training propagates the difference. A GPU's
# tolerances are wide because its kernels for a whole and a split matrix may differ in more than the order.
TOLERANCES = {"cpu": ("1e-5", "1e-3"), "cuda": ("1e-2", "1e-1")}
_LAYOUTS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}


@dataclass(frozen=True)
class Size:
    """The size of a network and of its training."""

    steps: int
    num_layers: int
    hidden_size: int
    seq_length: int
    global_batch_size: int
    lr: float


# Two CPU cores train the first within four minutes, long enough for whole sentences. The text is short and read twice:
# small batches learn more from it.
SIZES = {"cpu": Size(360, 4, 192, 128, 16, 3e-3), "cuda": Size(600, 8, 512, 256, 64, 1e-3)}


@dataclass(frozen=True)
class DemoFlags(ConfigSection):
    """Flags of this program."""

    work_dir: str = flag(
        "runs/quickstart",
        "folder for data, checkpoints and runs; data of an earlier run is reused",
        path=PathUse.FOLDER,
    )
    steps: int | None = flag(
        None,
        f"training steps, {SIZES['cpu'].steps} on a CPU; saves after each quarter, is killed a twelfth after the first",
        at_least=8,
    )
    num_layers: int | None = flag(None, f"transformer blocks, {SIZES['cpu'].num_layers} on a CPU", at_least=2)
    hidden_size: int | None = flag(None, f"width of the network, {SIZES['cpu'].hidden_size} on a CPU", at_least=4)
    seq_length: int | None = flag(None, f"tokens per sample, {SIZES['cpu'].seq_length} on a CPU", at_least=8)
    vocab_size: int = flag(4000, "size of the trained vocabulary", at_least=300)

    def problems(self) -> Iterator[str]:
        """Rules between the flags."""
        if self.hidden_size is not None and self.hidden_size % 4:
            yield f"--hidden-size {self.hidden_size} cannot be split into 4 heads. Use a multiple of 4."

    def size(self, device: str) -> Size:
        """The network for a device, as modified by the flags."""
        given = {field.name: getattr(self, field.name, None) for field in dataclasses.fields(Size)}
        return dataclasses.replace(SIZES[device], **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Demo:
    """The folders and commands of the demonstration.

    Args:
        ranks: number of processes of the first run.
    """

    flags: DemoFlags
    data: Path
    run: Path
    device: str = "cpu"
    ranks: int = 4

    @property
    def size(self) -> Size:
        """The network and its training."""
        return self.flags.size(self.device)

    @property
    def layout(self) -> tuple[int, int]:
        """Tensor and pipeline size of the first run."""
        return _LAYOUTS[self.ranks]

    @property
    def save_step(self) -> int:
        """The step whose checkpoint the run is resumed from."""
        return self.size.steps // 4  # one process trains most steps: on two cores it is faster than four

    @property
    def kill_step(self) -> int:
        """The step after whose log line the run is killed."""
        return self.save_step + max(2, self.size.steps // 12)

    @property
    def checkpoints(self) -> Path:
        """The checkpoint folder of both runs."""
        return self.run / "checkpoints"

    def prepare_data(self) -> None:
        """Prepares corpus, vocabulary and token files, unless an earlier run has."""
        done = self.data / "complete"
        if done.exists():
            say(f"using the data of an earlier run in {self.data}")
            return
        self.data.mkdir(parents=True, exist_ok=True)
        for command in self.data_commands():
            call(command)
        done.touch()

    def data_commands(self) -> list[list[str]]:
        """The commands that prepare the data."""
        corpus, prefix = self.data / "demo.jsonl", self.data / "demo"
        vocabulary = ["--output-prefix", prefix, "--vocab-size", self.flags.vocab_size]
        output = ["--output-prefix", prefix, "--dataset-impl", "mmap", "--append-eod", "--workers", 2]
        return [
            tool("corpus/build_demo_corpus.py", "--lang", "english", "--output", corpus),
            tool("train_tokenizer.py", "--input", corpus, *vocabulary),
            tool("preprocess_data.py", "--input", corpus, *output, *self.tokenizer_flags),
        ]

    @property
    def tokenizer_flags(self) -> list[object]:
        """The tokenizer that was trained on the corpus."""
        vocab_file, merge_file = self.data / "demo-vocab.json", self.data / "demo-merges.txt"
        return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab_file, "--merge-file", merge_file]

    def training_flags(self, run_name: str) -> list[object]:
        """The training flags of both runs, which differ only in layout and run directory."""
        size = self.size
        return [
            *("--num-layers", size.num_layers, "--hidden-size", size.hidden_size, "--num-attention-heads", 4),
            *("--num-query-groups", 2),
            *("--seq-length", size.seq_length, "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
            *("--swiglu", "--no-add-bias-linear", "--global-batch-size", size.global_batch_size),
            *("--train-iters", size.steps, "--lr", size.lr, "--min-lr", size.lr / 10, "--lr-decay-style", "cosine"),
            *("--lr-warmup-fraction", 0.1, "--adam-beta2", 0.95, "--weight-decay", 0.1, "--hidden-dropout", 0),
            *("--attention-dropout", 0, "--split", "95,3,2"),
            *("--data-path", self.data / "demo_text_document", *self.tokenizer_flags),
            *("--save", self.checkpoints, "--load", self.checkpoints, "--save-interval", self.save_step),
            *("--log-style", "short", "--log-interval", 10, "--eval-interval", self.save_step, "--eval-iters", 4),
            *("--run-dir", self.run / run_name),
        ]

    def start_first_run(self) -> subprocess.Popen[bytes]:
        """Starts training with TP 2 x PP 2, or less with fewer GPUs, under torchrun."""
        launcher = [
            *("-m", "torch.distributed.run", "--nproc-per-node", self.ranks, "--master-addr", "127.0.0.1"),
            *("--master-port", free_port(), ROOT / "pretrain_gpt.py"),
        ]
        command = python(1, *launcher, *self.layout_flags(*self.layout), *self.training_flags("killed"))
        show(command)
        return subprocess.Popen(command, cwd=ROOT)

    def resume_on_one_rank(self) -> None:
        """Resumes from the checkpoint in one process, without a launcher."""
        call(python(core_count(), ROOT / "pretrain_gpt.py", *self.layout_flags(1, 1), *self.training_flags("resumed")))

    def layout_flags(self, tensor: int, pipeline: int) -> list[object]:
        """The flags of a layout; a pipeline gets enough micro-batches to keep its stages busy."""
        micro_batch_size = self.size.global_batch_size // (4 if pipeline > 1 else 1)
        sizes = ["--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline]
        return [*sizes, "--micro-batch-size", micro_batch_size]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(DemoFlags, arguments, prog="kill_and_resume.py", description=__doc__ or "")
    device_type, ranks = hardware()
    work_dir = Path(flags.work_dir).resolve()
    data, run = work_dir / f"english-{flags.vocab_size}", work_dir / time.strftime("run-%Y%m%d-%H%M%S")
    demo = Demo(flags, data, run, device_type, ranks)
    demo.run.mkdir(parents=True)
    tensor, pipeline = demo.layout

    with phase("Text to tokens"):
        demo.prepare_data()
    title = f"Training on {tensor * pipeline} ranks (TP {tensor} x PP {pipeline})"
    with phase(f"{title}, killed after step {demo.kill_step} of {demo.size.steps}"):
        last_step = train_and_kill(demo)
    with phase(f"Resuming the checkpoint of step {demo.save_step} on 1 rank (TP 1 x PP 1)"):
        demo.resume_on_one_rank()
    with phase("Comparing the losses that the killed run logged after its last save with the resumed run's"):
        loss_tolerance, norm_tolerance = TOLERANCES[device_type]
        bounds = ["--tolerance", loss_tolerance, "--norm-tolerance", norm_tolerance]
        call(
            tool("runs/compare_runs.py", demo.run / "killed", demo.run / "resumed", "--after", demo.save_step, *bounds)
        )
    with phase("Loss curve"):
        picture = demo.run / "loss.png"
        names = [f"{ranks} ranks: tensor {tensor} × pipeline {pipeline}", "1 rank, resumed"]
        marks = [f"{demo.save_step}:checkpoint", f"{last_step}:SIGKILL"]
        runs = [demo.run / "killed", demo.run / "resumed"]
        call(tool("runs/plot_run.py", *runs, "--names", *names, "--mark", *marks, "--output", picture))
    with phase("Samples of the network"):
        show_samples(demo)
    say(f"\nEverything is in {demo.run}\n  loss curve   {picture}\n  checkpoints  {demo.checkpoints}")
    say(
        "\nNext, after `source .venv/bin/activate`:\n"
        f"  python tools/dashboard.py {demo.run}       the curves in a page\n"
        "  python train_on_text.py my_text.txt       train on your own text"
    )
    return 0


def hardware() -> tuple[str, int]:
    """The device type, and the number of ranks of the first run."""
    from megatron import device

    device.choose_accelerator()
    if device.device_type() != "cuda":
        return "cpu", 4
    count = min(4, device.device_count())
    return "cuda", 2 if count == 3 else count


def train_and_kill(demo: Demo) -> int:
    """Trains until some steps after the save, kills the launcher, checks that all ranks end; returns the last step.

    Raises:
        DemoError: training ended early, or a rank outlived its launcher.
    """
    from megatron.observe.metrics_file import read_steps

    metrics = demo.run / "killed" / "metrics.jsonl"
    saved = demo.checkpoints / f"iter_{demo.save_step:07d}"
    launcher = demo.start_first_run()
    try:
        while not (saved.exists() and max(read_steps(metrics), default=0) >= demo.kill_step):
            if launcher.poll() is not None:
                raise DemoError(
                    f"training ended with exit code {launcher.returncode} before it could be killed; see above."
                )
            time.sleep(0.2)
        ranks = children_of(launcher.pid)
        os.kill(launcher.pid, signal.SIGKILL)
    except BaseException:
        launcher.terminate()
        raise
    launcher.wait()
    say(f"sent SIGKILL to the launcher (process {launcher.pid}) of ranks {', '.join(map(str, ranks))}")
    deadline = time.monotonic() + EXIT_SECONDS
    while alive := [process for process in ranks if is_alive(process)]:
        if time.monotonic() > deadline:
            for process in alive:
                os.kill(process, signal.SIGKILL)
            if sys.platform.startswith("linux"):
                raise DemoError(f"ranks {alive} were still running {EXIT_SECONDS} s after their launcher was killed.")
            say(f"this system does not terminate the children of a killed process; also killed ranks {alive}")
        time.sleep(0.05)
    last_step = max(read_steps(metrics))
    say(f"all {len(ranks)} ranks have exited; the last logged step is {last_step}, the last save {demo.save_step}")
    return last_step


def show_samples(demo: Demo) -> None:
    """Generates continuations of the prompts and prints them."""
    prompts = demo.run / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    call(
        tool(
            *("generate_samples_gpt.py", "--load", demo.checkpoints, "--sample-input-file", prompts),
            *("--out-seq-length", 40, "--top_p", 0.9, "--temperature", 0.6, "--repetition-penalty", 1.1),
        )
    )
    for line in prompts.with_name("prompts.txt.out").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        say("-" * 60 + "\n" + whole_sentences(record["prompt"] + record["text"]))


def whole_sentences(text: str) -> str:
    """A text without an incomplete last sentence."""
    end = max(text.rfind(mark) for mark in ".!?")
    return text[: end + 1] if end >= 0 else text


class DemoError(MegatronError):
    """The demonstration failed."""


@contextlib.contextmanager
def phase(title: str) -> Iterator[None]:
    """A titled and timed part of the demonstration."""
    say(f"\n=== {title} ===")
    started_at = time.monotonic()
    yield
    say(f"--- {time.monotonic() - started_at:.0f} s")


def say(text: str) -> None:
    """Prints and flushes, to keep the order with the output of the programs."""
    print(text, flush=True)


def python(threads: int, *arguments: object) -> list[str]:
    """A command that runs this interpreter with `threads` threads on the CPU."""
    settings = [
        f"OMP_NUM_THREADS={threads}",
        "OMP_WAIT_POLICY=passive",
        "TOKENIZERS_PARALLELISM=false",
    ]
    return ["env", *settings, sys.executable, *map(str, arguments)]


def tool(name: str, *arguments: object) -> list[str]:
    """A command that runs one of the project's tools."""
    return python(core_count(), ROOT / "tools" / name, *arguments)


def call(command: Sequence[str]) -> None:
    """Runs a command and waits for it.

    Raises:
        DemoError: it failed.
    """
    show(command)
    code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    if code:
        raise DemoError(f"the command ended with exit code {code}; see above: {' '.join(command)}")


def show(command: Sequence[str]) -> None:
    """Prints a command as typed in a shell."""
    arguments = command[command.index(sys.executable) + 1 :]
    say("$ python " + shlex.join(argument.replace(f"{ROOT}/", "") for argument in arguments))


def core_count() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A TCP port of this machine that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(parent: int) -> list[int]:
    """The children of a process, from /proc or else from ps."""
    return sorted(process for process, (its_parent, _) in process_table().items() if its_parent == parent)


def is_alive(process: int) -> bool:
    """Returns True if a process is running; zombies are not."""
    _, state = process_table().get(process, (0, "Z"))
    return state != "Z"


def process_table() -> dict[int, tuple[int, str]]:
    """Parent and state letter of every process.

    Source: proc(5), /proc/PID/stat.
    """
    folders = (
        [path for path in Path("/proc").glob("[0-9]*") if path.is_dir()] if Path("/proc/self/stat").exists() else []
    )
    table = {}
    for folder in folders:
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has exited meanwhile
        table[int(folder.name)] = (int(parent), state)
    if not folders:
        try:
            listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True).stdout
        except OSError as failure:
            raise StorageError(f"neither /proc nor ps is available to watch the ranks: {failure}.") from failure
        for line in listing.splitlines():
            pid, ppid, state = line.split()
            table[int(pid)] = (int(ppid), state[0])
    return table


if __name__ == "__main__":
    process_exit.exit_with(main)
