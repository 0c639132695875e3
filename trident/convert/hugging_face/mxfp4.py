"""Reads weights in MXFP4, as in gpt-oss: blocks of 32 4-bit numbers with a common power-of-two scale.

A tensor is stored as `NAME_blocks`, two numbers per byte, and `NAME_scales`. It is read as bfloat16, which represents
every product of a number and its scale exactly.

Source: Open Compute Project, "OCP microscaling formats (MX) specification", version 1.0, 2023, sections 5.3.3 (E2M1)
and 6.3; order of the numbers: transformers `integrations/mxfp4.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.errors import ConversionError
from trident.convert.hugging_face.table.tensors import BoundPart
from trident.convert.hugging_face.weight_files import FileTensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_BLOCK_BYTES, _BIAS = 16, 127


@dataclass(frozen=True)
class Mxfp4Tensor(FileTensor):
    """Stacked matrices [input, output], stored as [output, input].

    Args:
        blocks: the numbers, [matrices, output, input / 32, 16] bytes.
        scales: the exponents, [matrices, output, input / 32].
    """

    blocks: FileTensor
    scales: FileTensor

    def read_box(self, part: BoundPart, start: tuple[int, ...], stop: tuple[int, ...]) -> torch.Tensor:
        """Reads a box of a part, see `FileTensor`; reads whole matrices."""
        inner = tuple(slice(low, high) for low, high in zip(start[1:], stop[1:], strict=True))
        rest = part.ordered_shape[1:]
        return torch.stack([self._matrix(index).reshape(rest)[inner] for index in range(start[0], stop[0])])

    def _matrix(self, index: int) -> torch.Tensor:
        """Decodes a matrix. Shapes: result `[input, output]` bfloat16."""
        packed, exponents = (_entry(tensor, index) for tensor in (self.blocks, self.scales))
        numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [output, input / 32, 32]
        values = torch.tensor(_VALUES, dtype=torch.bfloat16)[numbers.int()]
        return torch.ldexp(values, exponents.int().unsqueeze(-1) - _BIAS).to(torch.bfloat16).flatten(1).t()


def with_decoded_blocks(stored: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Replaces each pair of blocks and scales by the decoded tensor.

    Raises:
        ConversionError: blocks and scales do not match.
    """
    names = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
    pairs = {name: (stored[name + _BLOCKS], stored[name + _SCALES]) for name in names if name + _SCALES in stored}
    halves = {name + ending for name in pairs for ending in (_BLOCKS, _SCALES)}
    plain = {name: tensor for name, tensor in stored.items() if name not in halves}
    return plain | {name: _decoded(name, blocks, scales) for name, (blocks, scales) in sorted(pairs.items())}


def _decoded(name: str, blocks: FileTensor, scales: FileTensor) -> Mxfp4Tensor:
    are_bytes = {blocks.dtype, scales.dtype} == {"U8"}
    if not are_bytes or len(scales.shape) != 3 or blocks.shape != (*scales.shape, _BLOCK_BYTES):
        raise ConversionError(
            f"{blocks.name} is {blocks.dtype} {list(blocks.shape)} and {scales.name} {scales.dtype} "
            f"{list(scales.shape)}, which are not blocks of 32 numbers and their scales (MXFP4). Dequantize the model "
            "with transformers: from_pretrained(DIR, quantization_config=Mxfp4Config(dequantize=True)), then "
            "save_pretrained(NEW_DIR)."
        )
    matrices, outputs, groups = scales.shape
    shape = (matrices, 2 * _BLOCK_BYTES * groups, outputs)
    return Mxfp4Tensor(blocks.path, name, "BF16", shape, blocks.start_bytes, blocks, scales)


def _entry(tensor: FileTensor, index: int) -> torch.Tensor:
    shape = tensor.shape
    whole = BoundPart(tensor.name, (0,) * len(shape), shape, tuple(range(len(shape))), 1, 0)
    return tensor.read_box(whole, (index, *(0,) * (len(shape) - 1)), (index + 1, *shape[1:]))[0]
