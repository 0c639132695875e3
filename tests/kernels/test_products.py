"""Products through float32 are as exact as torch's, and keep the dtype."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import products
from megatron.kernels.attention.dense import attention
from megatron.kernels.choice import Implementation
from megatron.kernels.native.library import Library
from megatron.kernels.products import (
    batched_product,
    has_bfloat16_products,
    has_signature,
    linear,
    needs_widening,
    packed,
)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_product_has_the_bits_of_torchs(compiled: Library, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, gradient = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 40, 33), (9, 33), (9,), (2, 40, 9))
    )
    for trained in ((True, True, True), (True, False, False), (False, True, False)):
        found = []
        for implementation in (Implementation.TORCH, Implementation.CSRC):
            leaves = [part.clone() for part in (x, weight, bias)]
            wanted = [leaf.requires_grad_() for leaf, is_trained in zip(leaves, trained, strict=True) if is_trained]
            kept: set[int] = set()

            def keep(tensor: torch.Tensor, kept: set[int] = kept) -> torch.Tensor:
                kept.add(tensor.data_ptr())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = linear(*leaves, implementation)
            assert (leaves[0].data_ptr() in kept) == trained[1]  # the product of a frozen weight keeps no x
            found.append([y.detach(), *torch.autograd.grad(y, wanted, gradient)])
        assert all(map(torch.equal, *found))
    plain = [part.detach() for part in (x, weight, bias)]
    torch.library.opcheck(torch.ops.megatron.linear.default, tuple(part.float() for part in plain))
    assert torch.equal(linear(*plain), linear(*plain, Implementation.CSRC))
    with pytest.raises(RuntimeError, match=r"x is \[2, 40, 33\] and the weight \[9, 32\]"):
        linear(x, weight[:, :32], None, Implementation.CSRC)


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


def test_attention_goes_through_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(3, 1, 2, 64, 4).bfloat16().unbind()
    monkeypatch.setattr(products, "has_bfloat16_products", lambda: False)
    found = attention(query, key, value, 0.5, causal=True)
    exact = attention(query.float(), key.float(), value.float(), 0.5, causal=True)
    assert torch.equal(found, exact.bfloat16())


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


def test_training_and_evaluation_keep_torchs_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_onednn_product", lambda: pytest.fail("asked outside of generation"))
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    with torch.no_grad():
        assert torch.equal(linear(x, weight), F.linear(x, weight))


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


class _AsOnCuda:
    """`addmm` and `mm` as torch has them for CUDA, without rounding in between.

    Args:
        mixes: whether the sum may have another dtype than the matrices.
    """

    def __init__(self, *, mixes: bool) -> None:
        self.mixes, self.calls = mixes, 0

    def addmm(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype, out: Any) -> Any:
        if total.dtype is not a.dtype and not self.mixes:
            raise RuntimeError(f"self and mat2 must have the same dtype, but got {total.dtype} and {b.dtype}")
        assert out is total and out.dtype is out_dtype
        self.calls += 1
        return out.add_(a.to(out_dtype) @ b.to(out_dtype))

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)


@pytest.mark.parametrize("form", ["this torch", "torch 2.7", "torch 2.8", "torch 2.10"])
def test_the_product_adds_to_a_float32_sum_where_torch_has_it(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _AsOnCuda(mixes=form == "torch 2.10")
    older = SimpleNamespace(addmm=lambda total, a, b, *, out=None: total, mm=lambda a, b: a)
    monkeypatch.setattr(products, "_ADDING_DEVICES", ("cpu",))
    if form != "this torch":
        for name in ("addmm", "mm"):
            monkeypatch.setattr(torch, name, getattr(older if form == "torch 2.7" else fake, name))
    products._adds_to_float32.cache_clear()
    try:
        generator = torch.Generator().manual_seed(3)
        a, b = (torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 70), (70, 4)))
        total = products.product_in_float32(a, b)
        products.add_product_(total, a, b)
        can_add = form == "torch 2.10"
        exact, rounded = a.float() @ b.float(), (a @ b).float()
        assert torch.equal(total, 2 * (exact if can_add else rounded)) and fake.calls == 2 * can_add
        assert not torch.equal(exact, rounded)
    finally:
        products._adds_to_float32.cache_clear()


def test_products_of_one_dtype_are_added_as_ever() -> None:
    a, b, total = torch.full((2, 3), 2.0), torch.ones(3, 2), torch.ones(2, 2)
    products.add_product_(total, a, b)
    assert total.tolist() == [[7.0, 7.0]] * 2 and products.product_in_float32(a, b).tolist() == [[6.0, 6.0]] * 2
