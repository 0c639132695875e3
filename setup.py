"""Builds the optional compiled parts and lists the packages; everything else is in pyproject.toml.

The index builder needs a C++17 compiler and pybind11 (a build requirement), not torch and not CUDA. Without a compiler
the package is still installed and uses NumPy, with the same results. The fused operations of csrc/ops are built only on
request, `MEGATRON_BUILD_KERNELS=1 pip install --no-build-isolation .`, for the torch that is installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SKIP_VARIABLE = "MEGATRON_SKIP_EXTENSIONS"
KERNELS_VARIABLE = "MEGATRON_BUILD_KERNELS"


class OptionalBuild(build_ext):
    """Turns a failed build of an extension into a warning about what is slower without it."""

    def run(self) -> None:
        if os.environ.get(SKIP_VARIABLE):
            _warn(f"{SKIP_VARIABLE} is set")
            return
        super().run()
        if os.environ.get(KERNELS_VARIABLE):
            _build_kernels(Path("." if self.inplace else self.build_lib) / "megatron" / "kernels" / "binaries")

    def build_extension(self, extension: Extension) -> None:
        try:
            super().build_extension(extension)
        except Exception as failure:  # a missing or broken compiler causes various exceptions
            self.extensions = [other for other in self.extensions if other is not extension]
            _warn(f"{type(failure).__name__}: {str(failure)[:200]}")

    def copy_extensions_to_source(self) -> None:
        built = [extension for extension in self.extensions if os.path.exists(self._built_path(extension))]
        self.extensions, every = built, self.extensions
        try:
            super().copy_extensions_to_source()
        finally:
            self.extensions = every

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def _built_path(self, extension: Extension) -> str:
        return os.path.join(self.build_lib, self.get_ext_filename(self.get_ext_fullname(extension.name)))


def _build_kernels(folder: Path) -> None:
    """Builds the fused operations, and fails if that fails: they were asked for."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        from megatron.kernels.native.builder import BuildRequest, build
    except ImportError as failure:
        raise SystemExit(
            f"{KERNELS_VARIABLE} is set, and the fused operations are built against the installed torch: {failure}. "
            "Install torch and numpy first, and build without isolation: pip install --no-build-isolation ."
        ) from None
    try:
        build(BuildRequest(folder), lambda line: sys.stderr.write(f"{line}\n"))
    except Exception as failure:
        raise SystemExit(f"{KERNELS_VARIABLE} is set, and the build failed: {failure}") from None


def _warn(reason: str) -> None:
    sys.stderr.write(
        f"\nwarning: the compiled index builder was not built ({reason}).\n"
        "Training is not slower; the first build of a data order takes more time and memory (NumPy builds the same "
        "one).\n"
        "Install a C++17 compiler (for example `apt-get install g++`) and install again to get it.\n\n"
    )


def _compile_flags() -> list[str]:
    if sys.platform == "win32":
        return ["/std:c++17", "/O2", "/fp:precise"]
    # Fused multiply-add instructions would round differently and change the blend order on CPUs that have them.
    return ["-std=c++17", "-O2", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]


setup(
    # The presets of --model-preset are the files of examples/configs; an installed package has them inside.
    packages=[*find_packages(include=["megatron", "megatron.*", "trident", "trident.*"]), "megatron.presets"],
    package_dir={"megatron.presets": "examples/configs"},
    ext_modules=[
        Extension(
            "megatron.data.order._index_builder",
            sources=["csrc/index_builder/index_builder.cpp"],
            depends=["csrc/index_builder/sentence_map.h"],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=_compile_flags(),
            language="c++",
        )
    ],
    cmdclass={"build_ext": OptionalBuild},
)
