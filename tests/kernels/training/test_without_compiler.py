"""A run that compiles nothing does not import torch's compiler, and steps as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.kernels.optimizer import eager

ROOT = Path(__file__).resolve().parents[3]

RUN = """
import sys
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe
from megatron.parallel.joining import open_mesh
from megatron.train.build import open_run
from megatron.train.start_up.engine_opening import build_engine

for stage, extra in ((1, []), (0, ["--optimizer", "sgd"])):
    config = layout_config(Recipe(), (1, 1, 1), stage, extra)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    for step in range(2):
        engine.train_batch(local_batches(Recipe(), config, mesh, step, False), 1e-3)
print("torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
"""


def test_training_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False", done.stdout


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_the_step_is_that_of_torch(kind: type[torch.optim.Optimizer], options: dict[str, float]) -> None:
    weights = []
    for made in (kind, eager(kind)):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = made([parameter], lr=0.1, **options)
        calls: list[int] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(1))
        for _ in range(3):
            parameter.grad = parameter.detach().cos()
            optimizer.step()
        assert calls == [1, 1, 1] and type(optimizer).__name__ == kind.__name__
        weights.append(parameter.detach())
    assert torch.equal(*weights)
