"""What a step waited for, and what it held."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Waits:
    """Figures of one step on one process; None where they were not measured.

    Attributes:
        data_seconds: how long the step waited until its batch was read.
        communication_seconds: how long the messages to and from other ranks took, waiting for these ranks included:
            the collectives of tensor-parallel layers and of the loss, and all that DeepSpeed sends. On a GPU this is
            the time on the stream that waits for the message; what DeepSpeed sends beside the computation then counts
            although nothing waits for it.
        transfer_seconds: of these, what stages of a pipeline send to each other and wait for from each other.
        memory_bytes: the most memory the process has held so far.
    """

    data_seconds: float | None = None
    communication_seconds: float | None = None
    transfer_seconds: float | None = None
    memory_bytes: int | None = None
