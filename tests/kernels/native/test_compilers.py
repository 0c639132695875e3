"""The commands of a build."""

from __future__ import annotations

from pathlib import Path

from megatron.kernels.native.compilers import Toolchain


def test_flags_follow_the_operation_and_the_machine(tmp_path: Path) -> None:
    cpu = Toolchain(("ccache", "g++"), tmp_path, native=True)
    exact, fast = (
        cpu.compile_host(tmp_path, tmp_path / "x.cpp", tmp_path, is_exact=is_exact) for is_exact in (True, False)
    )
    assert exact[:2] == ["ccache", "g++"]
    assert "-ffp-contract=off" in exact and "-ffp-contract=fast" in fast and "-march=native" in fast
    both = Toolchain(("ccache", "g++"), tmp_path, nvcc="/cuda/bin/nvcc", architectures=("80", "90"))
    device = both.compile_device(tmp_path, tmp_path / "x.cu", tmp_path, is_exact=True)
    assert [word[-5:] for word in device if "gencode" in word] == ["sm_80", "sm_90"]
    assert "--fmad=false" in device
    assert "-DMEGATRON_WITH_CUDA" in both.compile_host(tmp_path, tmp_path / "x.cpp", tmp_path, is_exact=False)
    assert {"-ltorch_cuda", "-lcudart"} <= set(both.link([], tmp_path)) and "-lcudart" not in cpu.link([], tmp_path)
