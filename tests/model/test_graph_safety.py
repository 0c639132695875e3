"""Capture of a micro-batch in a CUDA graph: operations, sizes and memory must not depend on values.

Two micro-batches of other values in the same static inputs must run the same operations, on results of the same sizes,
with the same memory from outside. A graph refuses copies from the host, and without a graph the host waits for them: a
tensor that is made without a device lies on the default one, which is `meta` here, where computing with it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config import ModelConfig, ParallelRequest
from megatron.model.blocks.experts import Experts
from megatron.model.interface.step_context import MaskKind, Recompute, StepSettings
from megatron.objective.language_model import LanguageModelObjective
from megatron.objective.multi_token import MultiTokenObjective
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import SEED, build_gpt, tiny_config
from tests.helpers.ranks import run_ranks

BATCH, LENGTH = 2, 12
FORMS: dict[str, dict[str, Any]] = {
    "gpt": {"hidden_dropout": 0.1, "attention_dropout": 0.2},
    "llama": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "activation_function": "silu",
        "gated_linear_unit": True, "num_query_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
    "gemma": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "norm_placement": "sandwich",
        "apply_layernorm_1p": True, "attention_logit_softcap": 5.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
    "multi-token prediction": {
        "position_embedding_type": "rope", "mtp_num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.0,
    },
    "experts with a capacity": {
        "num_experts": 4, "moe_expert_capacity_factor": 0.7, "moe_min_capacity": 0, "gated_linear_unit": True,
        "activation_function": "silu", "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
    "gpt-oss with gates": {
        "position_embedding_type": "rope", "softmax_type": "learnable", "attention_output_gate": True,
        "num_query_groups": 2, "num_experts": 4, "moe_expert_capacity_factor": 0.7, "moe_mlp_bias": True,
        "moe_router_bias": True, "gated_linear_unit": True, "activation_function": "quick_gelu",
        "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
}  # fmt: skip
# On a CPU the host may look at values, which costs nothing, in lines that a GPU does not reach: the smallest and the
# largest id, the places of the labels that count, and whether the loss was multiplied.
READS_ON_A_CPU = {"aten._local_scalar_dense.default": 3, "aten.nonzero.default": 1}


EXPERTS: dict[str, Any] = {**FORMS["experts with a capacity"], "moe_shared_expert_intermediate_size": 8}


class Recorder(TorchDispatchMode):
    """Records the operations of a block of code with the sizes of their results, and the memory that they use but did
    not allocate.

    Attributes:
        operations: name, and shape and dtype of each result.
        outside: addresses of what was there before.
        constants: names of the operations that bring a number of the host to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self.outside: set[int] = set()
        self.constants: list[str] = []
        self._made: list[torch.UntypedStorage] = []  # kept, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and records one operation."""
        inputs = list(tensors_in((args, kwargs)))
        results = func(*args, **(kwargs or {}))
        outputs = list(tensors_in(results))
        self.operations.append((str(func), *((tuple(x.shape), x.dtype) for x in outputs)))
        if func is torch.ops.aten.lift_fresh.default:
            self.constants.append(str(func))
        made = {storage.data_ptr() for storage in self._made}
        self.outside |= {x.untyped_storage().data_ptr() for x in inputs} - made
        self._made += [x.untyped_storage() for x in outputs]
        return results

    def count(self, name: str) -> int:
        """The number of runs of an operation."""
        return sum(operation[0] == name for operation in self.operations)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


class MicroBatch:
    """The static inputs of a network, and one pass over them."""

    def __init__(self, config: ModelConfig, recompute: Recompute = Recompute.NONE, **options: Any) -> None:
        mesh = ParallelMesh.single()
        self.stack = build_gpt(config, mesh)
        self.objective, depths = LanguageModelObjective(mesh.tp, config.vocab_size), config.mtp_num_layers
        if depths:
            self.objective = MultiTokenObjective(mesh.tp, config.vocab_size, depths=depths)
        self.settings = StepSettings(
            seed=SEED,
            factored_logits=True,
            holds_parameters=True,
            recompute=recompute,
            has_tokens=depths > 0,
            **options,
        )
        segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
        self.segments = segments if self.settings.needs_segments else None
        self.tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        self.labels = torch.zeros((1 + depths) * BATCH, LENGTH, dtype=torch.int64)
        self.sample_ids = torch.zeros_like(self.tokens[:, 0])
        self.weights = torch.ones(self.labels.shape)

    def fill(self, seed: int) -> None:
        """Writes other values into the inputs, in place."""
        generator = torch.Generator().manual_seed(seed)
        for target in (self.tokens, self.labels):
            target.copy_(torch.randint(0, 101, target.shape, generator=generator))
        self.sample_ids.copy_(torch.arange(BATCH) + 10 * seed)

    def loss(self) -> torch.Tensor:
        """Forward and loss."""
        tokens = self.tokens if self.settings.has_tokens else None
        context = self.settings.context(self.sample_ids, self.segments, first_sample=0, tokens=tokens)
        outputs = self.stack(self.tokens, context)
        targets = {"labels": self.labels, "loss_mask": self.weights}
        if tokens is not None:
            targets["sample_weights"] = self.weights
        result = self.objective(outputs, targets, self.weights[0, 0])
        return result.loss_sum if result.minimized_sum is None else result.minimized_sum


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.BLOCKS], ids=lambda value: value.value)
@pytest.mark.parametrize("form", FORMS)
def test_other_values_run_the_same_operations_on_the_same_memory(form: str, recompute: Recompute) -> None:
    batch = MicroBatch(tiny_config(**FORMS[form]), recompute)
    recorders, losses = [], []
    for seed in (1, 2, 3):
        batch.fill(seed)
        batch.stack.zero_grad(set_to_none=False)
        with Recorder() as recorder:
            loss = batch.loss()
            loss.backward()
        recorders.append(recorder)
        losses.append(loss.item())
    _, first, second = recorders  # the first pass allocates the gradients
    assert len(set(losses)) == 3 and len(first.operations) > 100
    assert first.operations == second.operations and first.outside == second.outside
    assert not first.constants
    lookups = 1 + FORMS[form].get("mtp_num_layers", 0)  # each of which reads the smallest and the largest id
    for name, most in READS_ON_A_CPU.items():
        assert first.count(name) <= most + (2 * (lookups - 1) if "scalar" in name else 0)


def exchanging_passes(rank: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The operations of a layer whose experts are divided over two ranks, for other tokens in the same place."""
    mesh = open_mesh(ParallelRequest(expert_model_parallel_size=2))
    layer = Experts(tiny_config(**EXPERTS), mesh, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(BATCH, LENGTH, layer.router.weight.shape[1], requires_grad=True)
    passes = []
    for seed in (1, 2, 3):
        hidden.data.normal_(generator=torch.Generator().manual_seed(10 * seed + rank))
        with Recorder() as recorder:
            context = StepSettings().context(torch.arange(BATCH))
            layer(hidden, context).square().sum().backward()
        passes.append(recorder.operations)
    return passes[1], passes[2]


def test_experts_with_a_capacity_on_other_ranks_read_nothing() -> None:
    for first, second in run_ranks(exchanging_passes, 2):
        names = [name for name, *_ in first]
        assert first == second and sum("alltoall" in name for name in names) == 4
        assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & set(names)


SCALED_BY_LENGTH: dict[str, Any] = {"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0}
LLAMA_3: dict[str, Any] = {"rope_scaling_type": "llama3", "rope_scaling_factor": 8.0}
WINDOWS: dict[str, Any] = {"attention_window": 4, "rotary_base_windowed": 100.0, "attention_window_pattern": (1, 0)}
PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DOCUMENTS: dict[str, Any] = {"mask": MaskKind.DOCUMENTS, "restart_positions": True}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (FORMS["gpt"], {}),
        (PLAIN, DOCUMENTS),
        ({**PLAIN, "position_embedding_type": "alibi"}, {}),
        *((FORMS[name], {}) for name in ("llama", "gemma", "experts with a capacity")),
        (FORMS["llama"], DOCUMENTS),
        *(({**FORMS["llama"], **changes}, {}) for changes in (LLAMA_3, SCALED_BY_LENGTH, WINDOWS)),
    ],
)
def test_no_tensor_of_a_micro_batch_comes_from_the_host(changes: dict[str, Any], options: dict[str, Any]) -> None:
    batch, losses = MicroBatch(tiny_config(**changes), **options), []
    for device in ("cpu", "meta"):  # a tensor made once for all micro-batches may be copied in the first
        with torch.device(device):
            loss = batch.loss()
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_what_is_kept_depends_on_the_length_where_frequencies_do() -> None:
    config = tiny_config(**FORMS["llama"], **SCALED_BY_LENGTH, rope_original_max_positions=4)
    network, settings = build_gpt(config), StepSettings(seed=SEED)
    generator = torch.Generator().manual_seed(1)
    for length in (3, 6, 12, 6):
        tokens = torch.randint(0, 101, (BATCH, length), generator=generator)
        kept = network(tokens, settings.context(torch.arange(BATCH)))
        assert torch.equal(kept, network(tokens, StepSettings(seed=SEED).context(torch.arange(BATCH))))
    assert len(settings.kept) == 3
