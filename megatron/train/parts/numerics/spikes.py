"""What tells a spike from a usual step (--skip-spikes), and how many bad steps came last (--max-bad-steps)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.record import Progress, Record
from megatron.engine.engine import Engine
from megatron.train.part import Part
from megatron.train.run import Run


class Spikes(Part):
    """Has a resumed run drop the steps that a run without interruption would drop."""

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        if record is not None:
            engine.gate.restore(record.recent)

    def state(self, run: Run) -> Mapping[str, Any]:
        return {"recent": run.engine.gate.to_json()}
