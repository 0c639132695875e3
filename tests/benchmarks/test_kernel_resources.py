"""The table of what the CUDA kernels need: read from the compiler's words, and from the compiler itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import kernel_resources
from benchmarks.kernel_resources import markdown, parse_resources

PRINTED = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8megatron12_GLOBAL__N_18add_rowsIfLi4EEEvPT_l' for 'sm_80'
ptxas info    : Function properties for _ZN8megatron12_GLOBAL__N_18add_rowsIfLi4EEEvPT_l
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 10.1 ms
ptxas info    : Compiling entry function 'add_rows' for 'sm_90'
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 24 bytes cumulative stack size
"""


def test_registers_spills_and_shared_memory_are_read() -> None:
    first, second = parse_resources("dropout_add", PRINTED)
    assert (first.architecture, first.registers, first.spilled_bytes, first.shared_bytes) == ("80", 38, 0, 128)
    assert (second.architecture, second.registers, second.spilled_bytes, second.shared_bytes) == ("90", 255, 16, 0)
    assert second.plain_name == "add_rows"
    *_, last = markdown([second, kernel_resources.Kernel("dropout_add", "add_rows<float>", "80", 40, 0, 64)])
    assert last == "| dropout_add | add_rows | 1 | 40 | 255 | 64 | 16 |"
    assert parse_resources("norm", "nothing of interest") == []


def test_names_lose_what_all_have_in_common() -> None:
    if shutil.which("cu++filt") is None and shutil.which("c++filt") is None:
        pytest.skip("no c++filt is installed")
    mangled = "_ZN8megatron12_GLOBAL__N_18add_rowsIfLi4EEEvPT_l"
    assert kernel_resources.demangled([mangled]) == ["add_rows<float, 4>"]


@pytest.mark.full
def test_the_kernels_of_an_operation_are_compiled_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    assert kernel_resources.main(["--only", "dropout_add", "--architectures", "90,9999"]) == 0
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert "| sm_90 |" in heading and "9999" not in heading
    cells = {row.split("|")[2].strip(): [cell.strip() for cell in row.split("|")[1:-1]] for row in rows}
    assert cells.keys() >= {"forward", "backward"}
    assert all(row[0] == "dropout_add" and 0 < int(row[3]) <= 255 for row in cells.values())
    assert cells["forward"][-1] == "0"


@pytest.mark.parametrize(("operation", "kernels"), [("activation", 12), ("rotary", 8)])
def test_packets_are_stored_by_one_instruction(operation: str, kernels: int, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source, result = kernel_resources.SOURCES / operation / f"{operation}.cu", tmp_path / "kernels.ptx"
    flags = ("-std=c++17", "-O3", "--extended-lambda", "-arch=compute_90", "-ptx")
    subprocess.run([nvcc, *flags, "-I", str(kernel_resources.SOURCES), str(source), "-o", str(result)], check=True)
    _, *entries = result.read_text().split(".entry ")
    takes_packets = [entry for entry in entries if re.search(r"ld\.global(\.nc)?\.v4", entry)]
    assert len(takes_packets) == kernels
    assert all(re.search(r"st\.global\.wb\.v4\.u32", entry) for entry in takes_packets)


@pytest.mark.full
def test_rows_that_begin_at_packets_are_normalized_without_spills() -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    if not (shutil.which("cu++filt") or shutil.which("c++filt")):
        pytest.skip("no c++filt is installed")
    kernels = {
        kernel.name: kernel
        for kernel in kernel_resources.compile_one(nvcc, kernel_resources.SOURCES / "norm" / "norm.cu", "90")
    }
    for element in ("__half", "__nv_bfloat16"):
        held = [
            kernels[f"backward_held<{element}, {packets}, true, {sums}>"]
            for packets in (1, 2)
            for sums in ("true", "false")
        ]
        assert [kernel.spilled_bytes for kernel in held] == [0, 0, 0, 0]
        assert all(kernel.registers <= 80 for kernel in held[:2])  # three blocks of 256 threads on a multiprocessor
