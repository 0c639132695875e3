"""Every form of bounded attention against attention with a dense mask; which form is chosen."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from megatron.kernels.attention import gpu
from megatron.kernels.attention.blocks import DocumentBlocks, WindowBlocks
from megatron.kernels.attention.bounded import Form, choose_form, plan_attention
from megatron.kernels.attention.bounds import Bounds, local_bias, visible_blocks
from megatron.kernels.attention.dense import attention
from megatron.kernels.attention.gpu import (
    BLOCK,
    FlexAttention,
    VarlenAttention,
    block_mask,
    has_varlen,
    score_change,
)

HEADS, SCALE = 4, 0.3
CPU = torch.device("cpu")


def _segments(*lengths: Sequence[int]) -> torch.Tensor:
    """Document numbers of samples with documents of these lengths, not starting at 0."""
    return torch.stack([torch.cat([torch.full((n,), 3 + i) for i, n in enumerate(sample)]) for sample in lengths])


def _heads(batch: int, length: int, groups: int = HEADS, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((batch, HEADS, length, 16), (batch, groups, length, 16), (batch, groups, length, 16))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _dense_bias(bounds: Bounds, batch: int, length: int) -> torch.Tensor:
    """The bias of every head and sample with all its entries."""
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    prefixes = torch.zeros(batch, length, dtype=torch.bool) if bounds.prefix_mask is None else bounds.prefix_mask
    visible = ((distance >= 0) | prefixes[:, None] | bounds.bidirectional) & (
        distance.abs() < (bounds.window or length)
    )  # [b, s, s]
    segments = torch.zeros(batch, length) if bounds.segment_ids is None else bounds.segment_ids
    visible = visible & (segments[:, :, None] == segments[:, None])  # [b, s, s]
    slopes = torch.tensor(bounds.slopes or [0.0] * HEADS, dtype=torch.float64)[:, None, None]
    return (-slopes * distance.abs()).expand(batch, HEADS, length, length).masked_fill(~visible[:, None], -math.inf)


DOCUMENTS = _segments((40, 30, 1, 129), (200,), (3, 197))
# of the documents of the first sample 25, 0, 0 and 100 tokens, of the second 150, of the third 1 and 160
PREFIXES = torch.stack([torch.arange(200) < 25, torch.arange(200) < 150, torch.arange(200) < 1])
PREFIXES[0, 71:171] = True
PREFIXES[2, 3:163] = True
SLOPES = (0.5, 0.25, 0.125, 0.0625)
BOUNDS = {
    "documents": Bounds(DOCUMENTS),
    "window": Bounds(None, 70),
    "narrow window": Bounds(None, 3),
    "documents and window": Bounds(DOCUMENTS, 35),
    "documents and wide window": Bounds(DOCUMENTS, 120),
    "documents and slopes": Bounds(DOCUMENTS, None, SLOPES),
    "window and slopes": Bounds(None, 20, SLOPES),
    "all": Bounds(DOCUMENTS, 50, SLOPES),
    "documents and prefixes": Bounds(DOCUMENTS, prefix_mask=PREFIXES),
    "all with prefixes": Bounds(DOCUMENTS, 50, SLOPES, PREFIXES),
    "documents in both directions": Bounds(DOCUMENTS, bidirectional=True),
    "all in both directions": Bounds(DOCUMENTS, 50, SLOPES, bidirectional=True),
}
WITHOUT_DOCUMENTS = {
    "prefixes": Bounds(None, prefix_mask=PREFIXES),
    "prefixes and window": Bounds(None, 40, prefix_mask=PREFIXES),
    "prefixes and slopes": Bounds(None, None, SLOPES, PREFIXES),
    "window in both directions": Bounds(None, 40, bidirectional=True),
    "slopes in both directions": Bounds(None, None, SLOPES, bidirectional=True),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("name", [*BOUNDS, *WITHOUT_DOCUMENTS])
def test_flex_attention_equals_a_dense_mask(name: str, softcap: float | None) -> None:
    bounds = {**BOUNDS, **WITHOUT_DOCUMENTS}[name]
    heads = [head.detach() for head in _heads(3, 200, groups=2, dtype=torch.float32)]
    plan = FlexAttention.plan(bounds, heads[0], softcap)
    expected = attention(*heads, SCALE, bias=_dense_bias(bounds, 3, 200).float(), softcap=softcap)
    torch.testing.assert_close(plan.attend(*heads, SCALE, compiled=False), expected, atol=2e-5, rtol=2e-5)


LENGTHS = (200, 256, 300, 384, 500, 512, 600, 640, 700, 768)


@pytest.fixture
def flex_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The graphs that torch compiles of flex attention, without generating code; more than the limit is an error."""
    graphs: list[int] = []

    def trace(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(len(graphs))
        return graph.forward

    monkeypatch.setattr(
        gpu, "_compiled_flex_attention", cache(lambda: torch.compile(gpu.flex_attention, backend=trace))
    )
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield graphs
    torch.compiler.reset()


def test_ten_lengths_do_not_exhaust_flex_attention(flex_graphs: list[int]) -> None:
    for length in LENGTHS:
        heads = [head.detach() for head in _heads(1, length, groups=2, dtype=torch.float32)]
        bounds = Bounds(_segments((70, length - 70)), 50, SLOPES)
        found = FlexAttention.plan(bounds, heads[0], None).attend(*heads, SCALE)
        expected = attention(*heads, SCALE, bias=_dense_bias(bounds, 1, length).float())
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert len(flex_graphs) < len(LENGTHS) / 2


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300, 1000])
@pytest.mark.parametrize(
    "documents", [None, ((600,), (1, 599)), ((256, 344), (130, 200, 270)), ([6] * 100, [128] * 4 + [88])]
)
@pytest.mark.parametrize("prefix", [None, 400])
def test_no_visible_block_is_missed_and_whole_ones_are_whole(
    documents: tuple | None, window: int | None, prefix: int | None
) -> None:
    segments = None if documents is None else _segments(*documents)
    prefixes = None if prefix is None else torch.stack([torch.arange(600) < prefix, torch.arange(600) < 150])
    bounds = Bounds(segments, window, prefix_mask=prefixes)
    visible, whole = visible_blocks(segments, window, 600, BLOCK, CPU, prefixes)
    mask = block_mask(bounds, 600, CPU)
    reference = create_block_mask(mask.mask_mod, 2, None, 600, 600, device="cpu", BLOCK_SIZE=BLOCK)
    entries = torch.zeros(2, 640, 640, dtype=torch.bool)
    for sample in range(2):
        query, key = torch.meshgrid(torch.arange(600), torch.arange(600), indexing="ij")
        entries[sample, :600, :600] = mask.mask_mod(torch.tensor(sample), torch.tensor(0), query, key)
    blocks = entries.unflatten(2, (5, BLOCK)).unflatten(1, (5, BLOCK)).transpose(2, 3)  # [b, 5, 5, BLOCK, BLOCK]
    some, every = blocks.flatten(3).any(-1), blocks.flatten(3).all(-1)
    visible, whole = visible[:, 0].expand(2, 5, 5), whole[:, 0].expand(2, 5, 5)
    assert not (some & ~visible).any() and not (whole & ~every).any() and not (whole & ~visible).any()
    if prefixes is None and (window is None or documents is None):
        assert torch.equal(visible, some) and torch.equal(mask.to_dense().expand(2, 1, 5, 5), reference.to_dense())
        assert torch.equal(whole, every)


@pytest.mark.parametrize("name", [*WITHOUT_DOCUMENTS, "all with prefixes", "all in both directions"])
def test_dense_biases_of_prefixes(name: str) -> None:
    bounds = {**BOUNDS, **WITHOUT_DOCUMENTS}[name]
    query = torch.zeros(3, HEADS, 200, 16, dtype=torch.float64)
    expected = _dense_bias(dataclasses.replace(bounds, segment_ids=None), 3, 200)
    found = local_bias(query, 200, bounds.window, bounds.slopes, bounds.prefix_mask, bidirectional=bounds.bidirectional)
    assert torch.equal(found.expand_as(expected), expected)
    assert bounds.segment_ids is not None or plan_attention(query, bounds) is None


def test_score_change_is_none_where_scores_stay() -> None:
    assert score_change(Bounds(window=3), None, CPU) is None
    change = score_change(Bounds(slopes=(0.5, 0.25)), 2.0, CPU)
    head, query, key = torch.tensor(1), torch.tensor(7), torch.tensor(3)
    assert float(change(torch.tensor(4.0), torch.tensor(0), head, query, key)) == pytest.approx(2 * math.tanh(2) - 1)


def test_documents_for_flash_attention() -> None:
    query = torch.zeros(3, HEADS, 6, 16)
    plan = VarlenAttention.plan(Bounds(_segments((4, 2), (6,), (1, 5)), window=3), query)
    assert plan.starts.tolist() == [0, 4, 6, 12, 13, 18] and plan.longest == 6 and plan.window == 3
    assert VarlenAttention.plan(Bounds(window=3), query).starts.tolist() == [0, 6, 12, 18]


def test_local_bias_of_the_last_positions() -> None:
    query = torch.zeros(1, 2, 2, 4, dtype=torch.bfloat16)
    infinity = math.inf
    assert local_bias(query, 4, 2, ()).tolist() == [[[[-infinity, 0, 0, -infinity], [-infinity, -infinity, 0, 0]]]]
    sloped = local_bias(query, 3, None, (0.5, 0.25))
    assert sloped.dtype == torch.float32
    assert sloped[0].tolist() == [[[-0.5, 0, -infinity], [-1, -0.5, 0]], [[-0.25, 0, -infinity], [-0.5, -0.25, 0]]]


FORMS = [
    # device, dtype, head size, bounds, soft-cap, form with varlen and flex, form with flex alone
    ("cpu", torch.float32, 64, Bounds(), None, Form.DENSE, Form.DENSE),
    ("cpu", torch.float32, 64, Bounds(slopes=SLOPES), 5.0, Form.DENSE, Form.DENSE),
    ("cpu", torch.float32, 64, Bounds(DOCUMENTS), None, Form.DOCUMENTS, Form.DOCUMENTS),
    ("cpu", torch.bfloat16, 64, Bounds(DOCUMENTS, 50), None, Form.DOCUMENTS, Form.DOCUMENTS),
    ("cpu", torch.float32, 64, Bounds(None, 100), None, Form.WINDOWS, Form.WINDOWS),
    ("cpu", torch.float32, 64, Bounds(None, 101), None, Form.DENSE, Form.DENSE),
    ("cuda", torch.bfloat16, 64, Bounds(), None, Form.DENSE, Form.DENSE),
    ("cuda", torch.bfloat16, 64, Bounds(None, 200), None, Form.DENSE, Form.DENSE),
    ("cuda", torch.bfloat16, 64, Bounds(DOCUMENTS), None, Form.VARLEN, Form.FLEX),
    ("cuda", torch.float16, 64, Bounds(DOCUMENTS, 50), None, Form.VARLEN, Form.FLEX),
    ("cuda", torch.float32, 64, Bounds(DOCUMENTS), None, Form.FLEX, Form.FLEX),
    ("cuda", torch.bfloat16, 512, Bounds(DOCUMENTS), None, Form.FLEX, Form.FLEX),
    ("cuda", torch.bfloat16, 64, Bounds(slopes=SLOPES), None, Form.FLEX, Form.FLEX),
    ("cuda", torch.bfloat16, 64, Bounds(), 50.0, Form.FLEX, Form.FLEX),
    ("cuda", torch.float32, 8, Bounds(DOCUMENTS), None, Form.DENSE, Form.DENSE),
    ("cpu", torch.float32, 64, Bounds(DOCUMENTS, prefix_mask=PREFIXES), None, Form.DOCUMENTS, Form.DOCUMENTS),
    ("cpu", torch.float32, 64, Bounds(None, 50, prefix_mask=PREFIXES), None, Form.DENSE, Form.DENSE),
    ("cuda", torch.bfloat16, 64, Bounds(prefix_mask=PREFIXES), None, Form.FLEX, Form.FLEX),
    ("cuda", torch.bfloat16, 64, Bounds(DOCUMENTS, prefix_mask=PREFIXES), None, Form.FLEX, Form.FLEX),
]  # fmt: skip


@pytest.mark.parametrize(("device", "dtype", "size", "bounds", "softcap", "newest", "older"), FORMS)
def test_the_form_of_a_device_and_its_torch(
    device: str, dtype: torch.dtype, size: int, bounds: Bounds, softcap: float | None, newest: Form, older: Form
) -> None:
    query = _Query(device, dtype, (3, HEADS, 200, size))
    assert choose_form(query, bounds, softcap, varlen=True, flex=True) is newest
    assert choose_form(query, bounds, softcap, varlen=False, flex=True) is older
    neither = choose_form(query, bounds, softcap, varlen=False, flex=False)
    assert neither is (older if device == "cpu" else Form.DENSE)


def _varlen_of_torch_2_9(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):  # type: ignore[no-untyped-def]
    raise AssertionError("has no windows, so nothing may call it")


def _varlen_of_torch_2_10(  # type: ignore[no-untyped-def]
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):  # fmt: skip
    assert query.shape[1] == key.shape[1] == value.shape[1], "it has no grouped keys"
    return _packed_attention(query, key, value, cu_seq_q, scale, window_size)


def _varlen_of_torch_2_12(  # type: ignore[no-untyped-def]
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert enable_gqa is (query.shape[1] != key.shape[1])
    return _packed_attention(query, key, value, cu_seq_q, scale, window_size)


def _packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scale: float, window: tuple
) -> torch.Tensor:
    """torch's varlen attention. Shapes: query `[n, a, d]`, key and value `[n, g, d]`, starts `[documents + 1]`."""
    positions = torch.arange(len(query))
    document = torch.bucketize(positions, starts, right=True)
    distance = positions[:, None] - positions
    before, after = (len(query) if size < 0 else size for size in window)
    visible = (document[:, None] == document) & (distance <= before) & (-distance <= after)
    heads = [part.transpose(0, 1)[None] for part in (query, key, value)]
    bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -math.inf)[None, None]
    return attention(*heads, scale, bias=bias)[0].transpose(0, 1)


VARLEN = {
    **{"2.9": _varlen_of_torch_2_9, "2.10": _varlen_of_torch_2_10, "2.11": _varlen_of_torch_2_10},
    **{"2.12": _varlen_of_torch_2_12, "2.13": _varlen_of_torch_2_12},
}


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("window", [None, 35])
@pytest.mark.parametrize("version", ["2.10", "2.11", "2.12", "2.13"])
def test_variable_length_attention_as_each_torch_has_it(
    version: str, window: int | None, bidirectional: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_varlen_attention", lambda: VARLEN[version])
    assert has_varlen()
    bounds, heads = Bounds(DOCUMENTS, window, bidirectional=bidirectional), _heads(3, 200, groups)
    found = VarlenAttention.plan(bounds, heads[0]).attend(*heads, SCALE)
    torch.testing.assert_close(found, attention(*heads, SCALE, bias=_dense_bias(bounds, 3, 200)))


def test_windows_in_variable_length_attention_are_planned_without_a_value_and_documents_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "_varlen_attention", lambda: lambda query, *_, window_size, scale: query)
    with FakeTensorMode():  # tensors without values
        heads, documents = [torch.empty(3, 4, 200, 16) for _ in range(3)], torch.zeros(3, 200, dtype=torch.int64)
        assert VarlenAttention.plan(Bounds(None, 35), heads[0]).attend(*heads, SCALE).shape == heads[0].shape
        with pytest.raises(DynamicOutputShapeException):
            VarlenAttention.plan(Bounds(documents, 35), heads[0])


@pytest.mark.parametrize("function", [None, _varlen_of_torch_2_9])
def test_older_variable_length_attention_is_not_taken(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_varlen_attention", lambda: function)
    assert not has_varlen()


def test_installed_variable_length_attention_is_one_that_is_known() -> None:
    installed = gpu._varlen_attention()
    if installed is None:
        pytest.skip("torch is older than 2.9")
    names = list(inspect.signature(installed).parameters)
    version = ".".join(torch.__version__.split(".")[:2])
    if version in VARLEN:  # the fakes of the tests above are what they claim to be
        assert names == list(inspect.signature(VARLEN[version]).parameters)
    assert set(names) >= set(inspect.signature(VARLEN["2.10"]).parameters) or not has_varlen()


class _Query:
    """The properties of a tensor that decide, also for a device that is not here."""

    def __init__(self, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.device, self.dtype, self.shape = torch.device(device), dtype, shape


def test_plain_attention_needs_no_plan() -> None:
    assert plan_attention(torch.zeros(1, HEADS, 8, 4), Bounds(window=8)) is None


# Largest errors in parts of the largest entry: bfloat16 and float16 round by 2**-9 and 2**-12 of a number, and the few
# roundings on the way (probabilities, their gradients, each result) add up to some eight of them.
ROUNDINGS = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
DEVICES = [("cpu", torch.float64)]
DEVICES += [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in list(ROUNDINGS)[1:]]


def _check(plan: Any, bounds: Bounds, shape: tuple[int, int], softcap: float | None, device: str, dtype: Any) -> None:
    """Compares results and gradients of a plan with attention under a dense mask in float64."""
    heads = [head.detach().to(device).requires_grad_() for head in _heads(*shape, 2, dtype)]
    exact_heads = [head.detach().double().requires_grad_() for head in heads]
    y = plan.attend(*heads, SCALE)
    exact = attention(*exact_heads, SCALE, bias=_dense_bias(bounds, *shape).to(device), softcap=softcap)
    weights = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(dtype)
    results = [y, *torch.autograd.grad(y, heads, weights)]
    expected = [exact, *torch.autograd.grad(exact, exact_heads, weights.double())]
    for part, reference in zip(results, expected, strict=True):
        assert part.dtype == dtype
        assert (part - reference).abs().max() <= ROUNDINGS[dtype] * reference.abs().max(), (bounds, softcap)


def _on(bounds: Bounds, device: str) -> Bounds:
    tensors = {field: value.to(device) for field, value in vars(bounds).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(bounds, **tensors)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_plans_equal_a_dense_mask(device: str, dtype: torch.dtype) -> None:
    for bounds in (*BOUNDS.values(), *(WITHOUT_DOCUMENTS.values() if device == "cuda" else ())):
        for softcap in (None, 0.8):
            plan = plan_attention(_heads(3, 200, 2, dtype)[0].to(device), _on(bounds, device), softcap)
            if device == "cpu":
                assert isinstance(plan, WindowBlocks if bounds.segment_ids is None else DocumentBlocks)
            _check(plan, bounds, (3, 200), softcap, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_lengths_of_flex_attention_on_a_gpu(dtype: torch.dtype) -> None:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in LENGTHS:
            bounds = Bounds(_segments((70, length - 70)), 50, SLOPES)
            plan = FlexAttention.plan(_on(bounds, "cuda"), _heads(1, length, 2, dtype)[0].cuda(), None)
            _check(plan, bounds, (1, length), None, "cuda", dtype)
