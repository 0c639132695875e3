"""The choice of an implementation for each operation."""

from __future__ import annotations

from megatron.config.sections.computation import OPERATIONS
from megatron.kernels.choice import TORCH_KERNELS, Implementation, Kernels, is_installed


def test_choices_can_be_replaced_one_by_one() -> None:
    compiled = Kernels.all(Implementation.CSRC)
    assert {getattr(compiled, name) for name in OPERATIONS} == {Implementation.CSRC}
    changed = TORCH_KERNELS.replace({"norm": Implementation.CSRC})
    assert (changed.norm, changed.softmax) == (Implementation.CSRC, Implementation.TORCH)


def test_is_installed_does_not_import() -> None:
    assert is_installed("json")
    assert not is_installed("no_such_package_here")
    assert not is_installed("no_such_package_here.part")


def test_every_operation_of_the_flags_has_a_field() -> None:
    assert tuple(Kernels.__dataclass_fields__) == OPERATIONS
