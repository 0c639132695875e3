"""Opens a checkpoint of another program, whichever of the known formats it has."""

from __future__ import annotations

from pathlib import Path

from megatron.convert.deepspeed_format.engine_files import is_engine_folder, open_engine_folder
from megatron.convert.deepspeed_format.universal import is_universal, open_universal
from megatron.convert.megatron_format.distributed_files import is_distributed, open_distributed
from megatron.convert.megatron_format.model import ForeignModel
from megatron.convert.megatron_format.torch_files import Choices, is_torch_layout, open_torch_layout
from megatron.errors import ConversionError

# Files that name the newest checkpoint of a directory, and the folder that their text stands for.
_POINTERS = ("latest_universal", "latest", "latest_checkpointed_iteration.txt")
_LONGEST_NAME = 200


def open_foreign(path: Path, choices: Choices) -> ForeignModel:
    """Opens a checkpoint folder, or the newest one of a directory.

    Raises:
        ConversionError: it is none of the known formats, is incomplete, or of a network that is not one of ours.
        CheckpointError: a file is damaged or holds what is not admitted.
    """
    folder = newest_folder(path)
    if is_universal(folder):
        return open_universal(folder, choices)
    if is_distributed(folder):
        return open_distributed(folder, choices)
    if is_torch_layout(folder):
        return open_torch_layout(folder, choices)
    if is_engine_folder(folder):
        return open_engine_folder(folder, choices)
    names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "nothing"
    raise ConversionError(
        f"{folder} is no checkpoint of a known format; it holds {names}. Known are mp_rank_XX/model_optim_rng.pt and "
        "torch_dist (Megatron-LM), layer_XX-model_YY-model_states.pt and mp_rank_XX_model_states.pt (DeepSpeed), and "
        "zero/ (DeepSpeed universal). Hugging Face directories are imported by tools/import_hf.py."
    )


def newest_folder(path: Path) -> Path:
    """The folder that the files `latest`, `latest_universal` or `latest_checkpointed_iteration.txt` point at.

    Raises:
        ConversionError: there is no such directory, or the file points at nothing.
    """
    if not path.is_dir():
        raise ConversionError(f"{path} is no directory. Give the folder of a checkpoint.")
    for name in _POINTERS:
        pointer = path / name
        if not pointer.is_file():
            continue
        text = pointer.read_text(errors="replace")[:_LONGEST_NAME].strip()
        folder = f"iter_{int(text):07d}" if text.isascii() and text.isdecimal() and name == _POINTERS[-1] else text
        if not folder or folder in (".", "..") or "/" in folder or "\\" in folder or not (path / folder).is_dir():
            raise ConversionError(
                f"{pointer} says {text!r}, and {path} holds no such checkpoint. Give the checkpoint's own folder."
            )
        return path / folder
    return path
