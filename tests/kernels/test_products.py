"""Products through float32 are as exact as torch's, and keep the dtype."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels import products
from megatron.kernels.products import (
    batched_product,
    has_bfloat16_products,
    has_signature,
    linear,
    needs_widening,
    packed,
)
from tests.kernels.devices.adding_device import AddingDevice, adding_device


@pytest.mark.parametrize("with_bias", [True, False])
def test_wide_products_are_as_exact_as_torchs(monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 8, 33), (9, 33), (9,), (2, 8, 9))
    x, weight, bias, gradient = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    inputs = [x, weight, *([bias] if with_bias else [])]
    found = []
    for wide in (True, False):
        monkeypatch.setattr(products, "has_bfloat16_products", lambda wide=wide: not wide)
        leaves = [part.clone().requires_grad_() for part in inputs]
        y = linear(*leaves)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, gradient)])
        assert y.dtype == torch.bfloat16 and needs_widening(x) == wide
    exact = [part.double().requires_grad_() for part in inputs]
    expected = F.linear(*exact)
    references = [expected.detach(), *torch.autograd.grad(expected, exact, gradient.double())]
    for reference, ours, torchs in zip(references, *found, strict=True):
        assert (ours - reference).abs().max() <= 1.1 * (torchs - reference).abs().max() + 2**-8


@pytest.mark.skipif(not products.has_onednn_product(), reason="this torch has no product of oneDNN")
@pytest.mark.parametrize("trained", [(True, True, True), (True, False, False), (False, True, True)])
def test_products_by_onednn_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, trained: tuple[bool, ...]) -> None:
    monkeypatch.setattr(products, "SMALLEST_ONEDNN", 1)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in ((2, 150, 33), (9, 33), (9,))]
    gradient = torch.randn(150, 2, 9, generator=generator).transpose(0, 1)
    found = []
    for is_slow in (True, False):
        monkeypatch.setattr(products, "has_slow_blas", lambda is_slow=is_slow: is_slow)
        leaves = [value.clone().requires_grad_(wanted) for value, wanted in zip(values, trained, strict=True)]
        y = linear(*leaves)
        assert ("OneDnn" in str(y.grad_fn)) == is_slow
        linear(*leaves).mul_(2).sum().backward()  # no view, whose sum over ranks in place autograd would refuse
        with torch.no_grad():
            assert torch.equal(linear(*leaves), y)
        sums = torch.ones(9, 33)
        rows, columns = (part.reshape(300, -1) for part in (values[0], gradient))
        products.add_product_(sums, columns.t(), rows)  # 300 columns: oneDNN's is added
        replaced = torch.full((9, 33), torch.nan)
        products.add_product_(replaced, columns.t(), rows, replaces=True)
        held = torch.full((150, 9), torch.nan)
        with monkeypatch.context() as patch:
            patch.setattr(products, "PART_VALUES", 1)  # in parts of 64 rows
            products.add_product_(held, values[0][0], values[1].t(), replaces=True)
            products.add_product_(held.t(), values[1], values[0][0].t())
        gradients = torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], gradient)
        found.append([y.detach(), *gradients, sums, replaced, held])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class _Weights(TorchDispatchMode):
    """Notes which weights oneDNN's product is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_linear_pointwise" in str(func):
            self.given.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not products.has_onednn_product(), reason="this torch has no product of oneDNN")
def test_onednn_is_given_weights_for_which_it_has_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SMALLEST_ONEDNN", 1), ("PART_VALUES", 1), ("has_slow_blas", lambda: True)):
        monkeypatch.setattr(products, name, value)
    for rows, columns in ((200, 130), (130, 200)):  # split by rows, by columns
        wide = torch.randn(70, 2 * columns)
        for b in (wide[:, :columns], wide[:, ::2], torch.randn(columns, 70).t(), torch.randn(1, 1).expand(70, columns)):
            a, total = torch.randn(rows, 70), torch.zeros(rows, columns)
            with _Weights() as weights:
                products.add_product_(total, a, b)
                torch.testing.assert_close(products.matrix_product(a, b), total, rtol=1e-5, atol=1e-5)
            assert len(weights.given) == 5  # four parts and the whole
            assert all(weight.is_contiguous() or weight.t().is_contiguous() for weight in weights.given)
            torch.testing.assert_close(total, a @ b, rtol=1e-5, atol=1e-5)


def test_onednn_serves_where_the_library_behind_torch_leaves_instructions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "has_onednn_product", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    found = {}
    for capability in ("AVX512", "AVX2"):
        for vendor in ("AuthenticAMD", "GenuineIntel", ""):
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
            monkeypatch.setattr(products, "cpu_vendor", lambda vendor=vendor: vendor)
            found[capability, vendor] = products.has_slow_blas.__wrapped__()
    assert [case for case, is_slow in found.items() if is_slow] == [("AVX512", "AuthenticAMD")]


def test_wide_products_of_pairs_are_as_exact_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_bfloat16_products", lambda: False)
    shapes = ((3, 16, 7), (3, 7, 2), (3, 16, 2))
    a, b, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16() for shape in shapes)
    leaves = [part.clone().requires_grad_() for part in (a, b)]
    y = batched_product(*leaves)
    found = [y.detach(), *torch.autograd.grad(y, leaves, gradient)]
    expected = (a.double() @ b.double(), gradient.double() @ b.double().mT, a.double().mT @ gradient.double())
    for reference, ours in zip(expected, found, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - reference).abs().max() <= 2**-8 * reference.abs().max()


def test_only_bfloat16_on_a_cpu_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_bfloat16_products", lambda: False)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    assert [needs_widening(torch.zeros(1, dtype=dtype)) for dtype in dtypes] == [False, False, True]
    assert not needs_widening(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
    assert [needs_widening(torch.zeros(1, dtype=torch.bfloat16), rows) for rows in (1, 15, 16)] == [False, False, True]
    assert isinstance(has_bfloat16_products(), bool)


def test_products_of_generation_are_as_exact_as_torchs() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(40, 65, generator=generator), torch.randn(40, generator=generator)
    for shape in ((1, 8, 65), (1, 65), (3, 65), (0, 65)):
        x = torch.randn(shape, generator=generator)
        for own in (bias, None):
            exact = F.linear(x.double(), weight.double(), None if own is None else own.double())
            with torch.inference_mode():
                found = linear(x, weight, own)
            # float32 sums of 65 products of about 1
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=65 * 2**-24 * 16)


def test_packed_weights_are_as_exact_as_torchs() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, bias = torch.randn(400, 330, generator=generator), torch.randn(400, generator=generator)
    found = packed(weight)
    if found is None:
        assert not products._has_packing()
        return
    for shape in ((1, 8, 330), (330,), (40, 330), (0, 330)):
        x = torch.randn(shape, generator=generator)
        exact = F.linear(x.double(), weight.double(), bias.double())
        with torch.inference_mode():
            y = linear(x, found, bias)
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=330 * 2**-24 * 16)


def test_only_large_float32_matrices_whose_products_agree_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.ones(512, 512)
    for weight in (torch.ones(8, 8), large.bfloat16(), large[:, ::2], large * float("nan")):
        assert packed(weight) is None
    fake = SimpleNamespace(
        _reorder_linear_weight=lambda weight, rows: weight.to_mkldnn(),
        _linear_pointwise=lambda x, *_: torch.zeros(8, 512),
    )
    monkeypatch.setattr(products, "_has_packing", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", fake)
    assert packed(large) is None


def test_private_operations_of_another_signature_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def operation(schema: str) -> SimpleNamespace:
        return SimpleNamespace(default=SimpleNamespace(_schema=schema))

    known = operation(f"mkldnn::_linear_pointwise{products._PRODUCT}")
    changed = operation("mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr) -> Tensor Y")
    for fake, expected in ((known, True), (changed, False), (None, False)):
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_linear_pointwise=fake))
        assert has_signature("_linear_pointwise", products._PRODUCT) == expected


@pytest.mark.parametrize("form", ["this torch", "torch 2.7", "torch 2.8", "torch 2.10"])
def test_the_product_adds_to_a_float32_sum_where_torch_has_it(form: str) -> None:
    fake = AddingDevice(mixes=form == "torch 2.10")
    older = SimpleNamespace(addmm=lambda total, a, b, *, out=None: total, mm=lambda a, b: a)
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 70), (70, 4)))
    with adding_device({"this torch": torch, "torch 2.7": older}.get(form, fake)):
        total = products.product_in_float32(a, b)
        products.add_product_(total, a, b)
        can_add = form == "torch 2.10"
        assert products.can_add_product(total, torch.bfloat16) == can_add
        replaced = torch.full_like(total, torch.nan)
        products.add_product_(replaced, a, b, replaces=True)
    exact, rounded = a.float() @ b.float(), (a @ b).float()
    assert torch.equal(total, 2 * (exact if can_add else rounded)) and fake.calls == 4 * can_add
    assert torch.equal(2 * replaced, total) and not torch.equal(exact, rounded)
