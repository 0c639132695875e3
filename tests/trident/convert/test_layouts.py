"""Imported models on two replicas, tensor ranks and stages: logits, first loss and gradient norm of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.checkpoint import save
from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch
from megatron.engine.state import owned_pieces
from megatron.inference.loaded_model import load_weights
from megatron.model.gpt import gpt_layers, whole_logits
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import StepSettings
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import build_tokenizer
from megatron.train.restarts.restore import find_saved_run, load_tensors
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.trident.convert.comparison import export, load_reference, relative
from tests.trident.convert.tiny_models import LENGTH, sample_tokens

pytestmark = [pytest.mark.slow, pytest.mark.full]
# One of each family; one with a single key head for all ranks, and a number of heads that is no power of two.
MODELS = (
    "gpt2", "neox-parallel", "bloom-12", "llama-grouped-llama3", "llama-multi-query-linear", "mistral", "qwen2-window",
    "qwen3", "gemma2", "gemma3", "olmo2", "olmo3", "smollm3", "granite", "phi3-long", "mixtral", "qwen3-moe-plain",
    "gpt-oss", "deepseek-v2", "deepseek-v3",
)  # fmt: skip
# Of two processes: the sizes of tensor, pipeline and expert parallelism.
LAYOUTS = {"dp2": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "ep2": (1, 1, 2)}
WITH_EXPERTS = ("mixtral", "qwen3-moe-plain", "gpt-oss", "deepseek-v3")


class Numbers(NamedTuple):
    """Loss of an evaluation, then loss and gradient norm of the first step."""

    evaluated_loss: float
    first_loss: float
    gradient_norm: float


Found = tuple[dict[tuple[str, str], Numbers], dict[str, torch.Tensor]]


def models_of(layout: str) -> tuple[str, ...]:
    """The models that have what the layout divides."""
    return WITH_EXPERTS if layout == "ep2" else MODELS


def load_config(imported: Path, tp: int, pp: int, ep: int = 1) -> RunConfig:
    """The configuration of a run that continues the training of an imported model."""
    flags = {
        "--config": imported / "model.yaml", "--load": imported, "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp, "--seq-length": LENGTH, "--micro-batch-size": 1,
        "--global-batch-size": 2, "--train-iters": 1, "--lr": 1e-4, "--data-path": "none", "--clip-grad": 0,
        "--moe-aux-loss-coeff": 0, "--expert-model-parallel-size": ep, "--hidden-dropout": 0, "--attention-dropout": 0,
    }  # fmt: skip
    request = parse([*(str(part) for pair in flags.items() for part in pair), "--finetune"])
    tokenizer = build_tokenizer(request.data)
    facts = TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint)
    return resolve(request, Machine("cpu", 2, False, True), facts)


def batches() -> list[Batch]:
    """Two micro-batches of one sample, whose last token has no successor."""
    tokens = sample_tokens()
    mask = torch.ones(tokens.shape)
    mask[:, -1] = 0
    return [
        Batch(
            tokens[row : row + 1].numpy(),
            tokens.roll(-1, dims=1)[row : row + 1].numpy(),
            mask[row : row + 1].numpy(),
            torch.tensor([row]).numpy(),
            None,
        )
        for row in range(2)
    ]


def continue_training(config: RunConfig, mesh: ParallelMesh, folder: Path) -> Numbers:
    """What a run that continues from the checkpoint has at its first step; before it, the run is saved in a folder."""
    engine = build_engine(config, mesh)
    load_tensors(config, engine, saved := find_saved_run(config, mesh))
    if saved is not None and mesh.ep.size > 1:
        save(folder, 0, owned_pieces(engine), saved.record.to_json(), mesh)
    own = batches()[mesh.batch.rank :: mesh.batch.size]
    loss_sum, tokens = engine.evaluate(own)
    step = engine.train_batch(own, 1e-4)
    return Numbers(loss_sum / tokens, step.loss, step.gradient_norm)


def split_logits(config: RunConfig, mesh: ParallelMesh) -> torch.Tensor:
    """Logits over the tensor ranks."""
    network = LayerStack(gpt_layers(config.model, mesh)).eval()
    load_weights(network, Path(str(config.loading.load)), mesh)
    with torch.no_grad():
        logits = network(sample_tokens(), StepSettings().context(torch.arange(2)))
        return whole_logits(logits, mesh.tp, config.model.vocab_size)


def run_layouts(rank: int, folders: dict[str, Path], saved: Path) -> Found:
    """Every model in every layout of two processes."""
    numbers, logits = {}, {}
    for layout, (tp, pp, ep) in LAYOUTS.items():
        configs = {name: load_config(folders[name], tp, pp, ep) for name in models_of(layout)}
        mesh = open_mesh(next(iter(configs.values())).parallel)
        for name, config in configs.items():
            numbers[layout, name] = continue_training(config, mesh, saved / name)
            if tp > 1:
                logits[name] = split_logits(config, mesh)
    return numbers, logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def found(imported_model: Callable[[str], Path], saved: Path) -> Found:
    return run_ranks(run_layouts, 2, {name: imported_model(name) for name in MODELS}, saved, timeout_seconds=300)[0]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_is_the_same_in_every_layout(
    name: str,
    found: Found,
    tiny_model: Callable[[str], Path],
) -> None:
    reference = load_reference(tiny_model(name))[0]
    outcome = reference(sample_tokens(), labels=sample_tokens())
    outcome.loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in reference.parameters()])
    for layout in (layout for layout in LAYOUTS if name in models_of(layout)):
        numbers = found[0][layout, name]
        assert numbers.evaluated_loss == pytest.approx(outcome.loss.item(), rel=1e-5), layout
        assert numbers.first_loss == pytest.approx(outcome.loss.item(), rel=1e-5), layout
        assert numbers.gradient_norm == pytest.approx(norm.item(), rel=1e-4), layout
    assert relative(found[1][name], outcome.logits.detach()) <= 1e-5


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_an_export_from_divided_experts_has_the_weights_that_were_imported(
    name: str, found: Found, tiny_model: Callable[[str], Path], saved: Path, tmp_path: Path
) -> None:
    assert ("ep2", name) in found[0]
    (original, _), (exported, report) = map(load_reference, (tiny_model(name), export(saved / name, tmp_path / name)))
    weights = original.state_dict()
    assert not any(report.values()) and exported.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in exported.state_dict().items())
