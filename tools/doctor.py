"""Checks the installation and reports what is usable, slow or broken, and how to fix it.

    python tools/doctor.py
    python tools/doctor.py --json
    python tools/doctor.py --layouts -- pretrain_gpt.py FLAGS

--layouts lists instead the layouts that the flags after -- can be combined with, with the test that trains each, and
the reasons against the others. If the flags themselves are refused, it prints the reasons and single changes that help.

The exit code is 0 if training can start, 78 if not. Works even if torch or other packages are missing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import __version__, log, process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import ExitCode

OK, SLOW, REFUSED = "ok", "slow", "refused"
MARKS = {OK: "ok     ", SLOW: "slow   ", REFUSED: "REFUSED"}

# Distribution, oldest version, purpose. Training cannot start without the first group.
NEEDED = (
    ("torch", "2.7", "tensors, gradients and collectives"),
    ("deepspeed", "0.19.8", "pipeline and ZeRO engines"),
    ("numpy", "1.26", "reading and ordering data"),
    ("safetensors", "0.4.3", "checkpoints"),
    ("tokenizers", "0.20", "tokenizers"),
    ("tensorboard", "2.14", "--tensorboard-dir"),
    ("pyyaml", "6.0", "YAML files of --config"),
    ("orjson", "3.10", "preprocessing"),
    ("jinja2", "3.1.6", "chat templates"),
    ("tqdm", "4.66", "progress bars"),
)
FASTER = (("gigatoken", "0.10", "speeds up preprocessing several times"),)
OPTIONAL = (
    ("matplotlib", "plot", "loss curves as pictures"),
    ("pyarrow", "data", "Parquet input"),
    ("zstandard", "data", "jsonl.zst input"),
    ("transformers", "data", "tokenizers without a tokenizer.json"),
    ("sentencepiece", "data", "SentencePiece models"),
    ("wandb", "wandb", "--wandb-project"),
)
PROJECT = "trident-megatron"
BUILD = "python tools/build_kernels.py"


@dataclass(frozen=True)
class DoctorFlags(ConfigSection):
    """Flags of this program."""

    json: bool = flag(False, "print the findings as one JSON object")
    layouts: bool = flag(False, "list the layouts that the command after -- can be combined with")


@dataclass(frozen=True)
class Finding:
    """The result of one check: its status, and how to fix a problem."""

    section: str
    subject: str
    status: str
    text: str
    fix: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Checks this machine and prints the findings."""
    from megatron.secret_text import masked_values

    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = parse_flags(DoctorFlags, arguments[:end], prog="doctor.py", description=__doc__ or "")
    if flags.layouts:
        show_layouts([text for text in arguments[end + 1 :] if not text.endswith(".py")], as_json=flags.json)
        return ExitCode.DONE
    findings = [Finding(**masked_values(dataclasses.asdict(finding))) for finding in examine()]
    can_start = not any(finding.status == REFUSED for finding in findings)
    if flags.json:
        report = {"can_start": can_start, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=1))
    else:
        show(findings, can_start)
    return ExitCode.DONE if can_start else ExitCode.HUMAN


def show(findings: Sequence[Finding], can_start: bool) -> None:
    """Prints the findings by section, and a summary."""
    width = max(24, *(len(finding.subject) for finding in findings))
    for section in dict.fromkeys(finding.section for finding in findings):
        log.text(section)
        for finding in findings:
            if finding.section == section:
                log.text(f"  {MARKS[finding.status]} {finding.subject:<{width}} {finding.text}")
                if finding.fix:
                    log.text(f"          -> {finding.fix}")
    if can_start:
        print(f"\nTraining can start. {what_is_slow(findings)}")
    else:
        refused = ", ".join(finding.subject for finding in findings if finding.status == REFUSED)
        print(f"\nTraining cannot start yet: {refused}. Follow the instructions after the arrows above.")


def show_layouts(arguments: Sequence[str], *, as_json: bool) -> None:
    """Prints the values of every axis of the layout: given, working with its test, or refused with the reason.

    For a refused command, prints the reasons, and values that are accepted.
    """
    from docs.site.layout_survey import survey
    from docs.site.layouts import TESTED_BY, test_of

    result = survey(arguments)
    tests = {
        one.value: TESTED_BY[one.value] if one.axis == "pipeline" else test_of(result.pipeline, one.value)
        for one in result.alternatives
    }
    if as_json:
        rows = [{**dataclasses.asdict(one), "test": tests[one.value]} for one in result.alternatives]
        print(json.dumps({"problems": result.problems, "alternatives": rows}, indent=1))
        return
    shown = result.alternatives
    if result.problems:
        shown = tuple(one for one in shown if not one.problems)
        log.text("REFUSED")
        for problem in result.problems:
            log.text(f"  {problem}")
        log.text(
            f"{'One of these changes is sufficient' if shown else 'No single change of the layout is sufficient'}."
        )
    for axis in dict.fromkeys(one.axis for one in shown):
        log.text(axis)
        for one in shown:
            if one.axis == axis:
                status = "REFUSED" if one.problems else "given  " if one.is_given else "works  "
                test = None if one.problems else tests[one.value]
                without = f", without {', '.join(one.dropped)}" if one.dropped and not one.is_given else ""
                log.text(f"  {status} {one.value}{without}" + (f"  ({test})" if test else ""))
                for problem in one.problems:
                    log.text(f"          {problem}")


def what_is_slow(findings: Sequence[Finding]) -> str:
    """A sentence about what would make training faster."""
    slow = [finding.subject for finding in findings if finding.status == SLOW]
    if slow:
        return f"Slower than necessary: {', '.join(slow)}. See the arrows above."
    if any(BUILD in finding.text for finding in findings if finding.section == "kernels"):
        return f"Compiled kernels would make it faster: {BUILD}"
    return "Nothing to improve."


def examine() -> Iterator[Finding]:
    """Runs all checks; a check that fails because of missing or broken packages becomes a finding."""
    parts: tuple[Callable[[], Iterator[Finding]], ...] = (
        system_findings,
        package_findings,
        project_findings,
        device_findings,
        collective_findings,
        slurm_findings,
        kernel_findings,
        index_findings,
    )
    for part in parts:
        try:
            yield from part()
        except Exception as failure:
            name = part.__name__.removesuffix("_findings")
            missing = getattr(failure, "name", None) if isinstance(failure, ImportError) else None
            fix = f"Install {missing}." if missing else "Install the project again: pip install -e ."
            yield Finding(name, "not examined", REFUSED, f"{type(failure).__name__}: {first_line(failure)}", fix)


def system_findings() -> Iterator[Finding]:
    """Checks Python and the machine."""
    version = platform.python_version()
    fits = (3, 10) <= sys.version_info[:2] <= (3, 13)
    fix = "" if fits else "Tested with Python 3.10 to 3.13; use one of these."
    yield Finding("system", "Python", OK if fits else SLOW, f"{version} ({sys.executable})", fix)
    yield Finding("system", "platform", OK, platform.platform())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("system", "cores", OK, f"{cores} usable by this process")
    for launcher in ("torchrun", "srun", "mpirun"):
        if path := shutil.which(launcher):
            yield Finding("system", launcher, OK, path)
    if not sys.platform.startswith("linux"):
        fix = "After killing a launcher, kill the ranks yourself."
        yield Finding(
            "system",
            "orphaned ranks",
            SLOW,
            "ranks exit with a killed launcher only on Linux",
            fix,
        )


def package_findings() -> Iterator[Finding]:
    """Checks distributions and their versions."""
    for name, oldest, purpose in NEEDED:
        installed = installed_version(name)
        if installed is None:
            yield Finding(
                "packages", name, REFUSED, f"missing; needed for {purpose}", f'pip install "{name}>={oldest}"'
            )
        elif numbers(installed) < numbers(oldest):
            fix = f'pip install "{name}>={oldest}"'
            yield Finding("packages", name, REFUSED, f"{installed} is older than {oldest}; needed for {purpose}", fix)
        else:
            yield Finding("packages", name, OK, installed)
    for name, oldest, purpose in FASTER:
        installed = installed_version(name)
        if installed is None or numbers(installed) < numbers(oldest):
            yield Finding(
                "packages", name, SLOW, f"{installed or 'missing'}; {purpose}", f'pip install "{name}>={oldest}"'
            )
        else:
            yield Finding("packages", name, OK, installed)
    for name, extra, purpose in OPTIONAL:
        text = installed_version(name) or f"not installed; needed for {purpose}: pip install '{PROJECT}[{extra}]'"
        yield Finding("packages", name, OK, text)


def project_findings() -> Iterator[Finding]:
    """Checks this project, and for other packages named `megatron`."""
    package = Path(__file__).resolve().parent.parent / "megatron"
    installed = installed_version(PROJECT)
    text = f"{__version__} in {package.parent}" + ("" if installed else "; not installed, used from its checkout")
    yield Finding("project", PROJECT, OK, text)
    spec = importlib.util.find_spec("megatron")
    origin = Path(spec.origin).parent if spec and spec.origin else None
    if origin is not None and origin.resolve() != package:
        fix = f"Run from {package.parent}, or install this checkout: pip install -e {package.parent}"
        yield Finding("project", "import megatron", REFUSED, f"imports {origin}, not this checkout", fix)
    core = installed_version("megatron-core")
    if core is not None:
        yield Finding(
            "project",
            "megatron-core",
            SLOW,
            f"{core} is also installed and has the same import name megatron: only one of them can be imported",
            "Use separate environments, or pip uninstall megatron-core.",
        )


def device_findings() -> Iterator[Finding]:
    """Checks the compute devices."""
    from megatron import device

    kind = device.device_type()
    count = device.device_count()
    name = device.device_name()
    yield Finding("device", kind, OK, f"{count} x {name}" if kind == "cuda" else "computation runs on the CPU")
    if kind == "cpu" and shutil.which("nvidia-smi"):
        yield Finding(
            "device",
            "GPU",
            SLOW,
            "nvidia-smi is installed, but torch uses no GPU (DS_ACCELERATOR=cpu, no driver, or a CPU build of torch)",
            "Unset DS_ACCELERATOR, or install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )
    dtypes = [name for name, usable in (("fp16", device.supports_fp16()), ("bf16", device.supports_bf16())) if usable]
    yield Finding("device", "dtypes", OK, ", ".join(["fp32", *dtypes]))
    if kind == "cpu":
        yield Finding("device", "--fp16", OK, "not available on the CPU; use --bf16")


def collective_findings() -> Iterator[Finding]:
    """Checks the collective backends."""
    from megatron import device
    from megatron.parallel.backends import usable_backends

    usable, default = usable_backends(), device.default_backend()
    for name, is_usable in usable.items():
        if name == default and not is_usable:
            fix = "Install an official build of torch (pip install torch), or choose --distributed-backend."
            yield Finding(
                "collectives", name, REFUSED, "missing from this build of torch, but required by this device", fix
            )
        else:
            text = (
                "available, and the default here"
                if name == default
                else "available"
                if is_usable
                else "missing from this build of torch, and not needed"
            )
            yield Finding("collectives", name, OK, text)


def slurm_findings() -> Iterator[Finding]:
    """Reports the master address and the start command inside a Slurm job."""
    from megatron.parallel.joining import has_address, slurm_job

    job = slurm_job()
    if job is None:
        return
    first, address = job.hosts[0], job.master_address
    nodes = first if len(job.hosts) == 1 else f"{len(job.hosts)} nodes, {first} to {job.hosts[-1]}"
    yield Finding("slurm", f"job {job.job}", OK, nodes)
    if address in (None, first):
        yield Finding("slurm", "MASTER_ADDR", OK, f"{first}, the node of rank 0; detected by ranks that srun starts")
    elif address in job.hosts or not has_address(address):
        problem = (
            "is not the first node of the job" if address in job.hosts else "is not a host name that can be resolved"
        )
        yield Finding(
            "slurm",
            "MASTER_ADDR",
            REFUSED,
            f"{address} {problem}; rank 0 runs on {first}",
            f"Unset MASTER_ADDR, or set it to {first}.",
        )
    else:
        yield Finding("slurm", "MASTER_ADDR", OK, f"{address}, which must be an address of {first}")
    yield Finding("slurm", "command", OK, f"{job.command} pretrain_gpt.py ...")


def kernel_findings() -> Iterator[Finding]:
    """Lists the implementation that each operation uses."""
    from megatron.kernels.native.report import kernel_report

    for choice in kernel_report():
        yield Finding("kernels", choice.operation, OK, ": ".join(filter(None, (choice.implementation, choice.note))))


def index_findings() -> Iterator[Finding]:
    """Checks the builder of sample indices."""
    from megatron.data.order.index_map import compiled_builder

    if compiled_builder() is not None:
        yield Finding("data", "index builder", OK, "compiled")
    else:
        fix = "Install a C++ compiler, then install the project again: pip install -e ."
        text = (
            "not compiled: NumPy gives the same result, but the first start on a large corpus may take minutes longer"
        )
        yield Finding("data", "index builder", SLOW, text, fix)


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def first_line(failure: BaseException) -> str:
    """The first line of an exception's message, shortened."""
    return (str(failure).splitlines() or [""])[0][:200]


if __name__ == "__main__":
    process_exit.exit_with(main)
