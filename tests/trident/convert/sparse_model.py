"""A Llama whose files are almost all holes: large to the program, small on the disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from tests.trident.convert.tiny_models import END, TOKENS, write_tokenizer
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.streaming import network_shapes
from trident.convert.hugging_face.table.tensors import bind, their_shapes
from trident.convert.hugging_face.weight_files import PlannedTensor, plan_files


def write_sparse_model(folder: Path, *, layers: int, hidden: int, inner: int, rows: int = TOKENS) -> int:
    """Writes the directory of a bfloat16 Llama with a tied head: embedding and norms are random, the rest zero.

    Returns:
        the size of its weights in bytes.
    """
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128, "vocab_size": rows, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": END,
        "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    family = family_of(config)
    tensors = bind(family.tensors, network_shapes(family.read_config(config)))
    planned = [PlannedTensor(name, "BF16", shape) for name, shape in their_shapes(tensors).items()]
    files = plan_files(planned, 5 * 10**9)
    for name, members in files.items():
        _write_file(folder / name, members)
    if len(files) > 1:
        weight_map = {tensor.name: name for name, members in files.items() for tensor in members}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}  # transformers wants the first to be there
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_tokenizer(folder)
    return sum(tensor.size_bytes for tensor in planned)


def _write_file(path: Path, tensors: list[PlannedTensor]) -> None:
    """Writes the header and the values that are not zero; the rest of the file is a hole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    drawn = torch.Generator().manual_seed(1)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        place = 8 + len(text)
        for tensor in tensors:
            if "norm" in tensor.name or "embed" in tensor.name:
                file.seek(place)
                values = torch.randn(math.prod(tensor.shape), generator=drawn).bfloat16()
                file.write(values.view(torch.uint8).numpy().data)
            place += tensor.size_bytes
        file.truncate(place)
