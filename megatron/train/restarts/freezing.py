"""Which parameters a run trains, whether it begins anew or continues with others frozen than before."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from megatron import log
from megatron.checkpoint.record import Record
from megatron.config import FinetuningConfig, LoadingConfig, ModelConfig
from megatron.engine.freezing import EVERYTHING_IS_TRAINED, Freezing, frozen_names
from megatron.model.interface.network import LayerSpec, parameter_names
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh

_SHOWN = 3


def check_patterns(finetuning: FinetuningConfig, model: ModelConfig) -> None:
    """Checks --freeze before the ranks meet; the names of parameters are the same in every layout.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    if finetuning.freeze:
        frozen_names(finetuning.freeze, parameter_names(network_layers(model, ParallelMesh.single("meta"))))


def find_freezing(
    finetuning: FinetuningConfig,
    loading: LoadingConfig,
    network: Sequence[LayerSpec],
    mesh: ParallelMesh,
    record: Record | None,
) -> Freezing:
    """What --freeze says, with what the checkpoint lacks because it was frozen there.

    Args:
        record: of the checkpoint that the run continues from, or whose weights it takes.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    continued = record if loading.takes_optimizer_state else None
    before = () if continued is None else _patterns(continued.config)
    began_at = {} if continued is None else continued.began_at
    if not finetuning.freeze and not before and not began_at:
        return EVERYTHING_IS_TRAINED
    names = parameter_names(network)
    frozen = frozen_names(finetuning.freeze, names) if finetuning.freeze else frozenset()
    thawed = frozenset(name for pattern in before for name in fnmatch.filter(names, pattern)) - frozen
    counts = {name: count for name, count in began_at.items() if name not in frozen}
    if continued is not None and thawed:
        counts.update(dict.fromkeys(sorted(thawed), continued.optimizer_updates))
        if mesh.world.rank == 0:
            log.warning(
                f"{len(thawed)} parameters that were frozen are trained from here on ({_listed(sorted(thawed))}): "
                "their moments start from zero."
            )
    return Freezing(frozen, thawed, counts)


def _patterns(saved: Mapping[str, Any]) -> Sequence[str]:
    """The --freeze of a saved configuration."""
    sections = (section for section in saved.values() if isinstance(section, Mapping))
    return next((tuple(map(str, section["freeze"])) for section in sections if section.get("freeze")), ())


def _listed(names: Sequence[str]) -> str:
    left = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {left} more" if left > 0 else "")
