"""Checks the bindings of operations as a program of its own: a process can load one library of an operation.

python -m tests.kernels.emulator.binding_program embedding
"""

from __future__ import annotations

import sys

import torch

from csrc.emulator import emulator
from csrc.emulator.harness import builds
from megatron.kernels import embedding, norms
from megatron.kernels.attention import softmax
from tests.kernels.devices.cases import CASES
from tests.kernels.devices.checks import LAYOUTS, TOLERANCES, check_case

REGISTRATIONS = {"embedding": embedding.register, "norm": norms.register, "softmax": softmax.register}
MOST_ELEMENTS = 100_000  # of a case, since emulated threads take their turns


def main(operation: str) -> None:
    """Runs the cases of an operation in every dtype."""
    with emulator.launch(operation, "fused", "random"):
        torch.ops.load_library(str(builds.binding(operation)))
        REGISTRATIONS[operation]()
        for number, case in enumerate(CASES[operation]()):
            if sum(value.numel() for value in case.inputs.values()) <= MOST_ELEMENTS:
                for dtype in TOLERANCES:
                    check_case(case, dtype, "cpu", LAYOUTS[number % len(LAYOUTS)])


if __name__ == "__main__":
    main(sys.argv[1])
