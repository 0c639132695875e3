"""How a run is watched: the progress bar, the peak that utilization refers to, and profiles of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection

# Megatron-LM's defaults: steps that are complete when the profile begins and when it ends.
_START, _STEPS = 10, 2
PROFILES = ("pt", "pt-full")


@dataclass(frozen=True)
class WatchingConfig(ConfigSection):
    """Progress bar, utilization and profiles."""

    progress_bar: bool = flag(True, "on a terminal, a bar instead of log lines, which log.txt in the run folder keeps")
    peak_tflops: float | None = flag(
        None,
        "what a device can do at most, in TFLOP/s, for the utilization of the hardware (MFU); if unset, known GPUs "
        "have theirs in bfloat16",
        above=0,
    )
    profile: tuple[str, ...] | None = flag(
        None,
        "write traces of some steps and tables of their operations into the run folder; pt-full with shapes, memory "
        "and stacks",
        nargs="*",
        choices=PROFILES,
    )
    profile_step_start: int | None = flag(
        None, f"steps that are complete when the profile begins; {_START} if unset", at_least=0
    )
    profile_step_end: int | None = flag(
        None, f"steps that are complete when it ends; {_STEPS} more than at the beginning if unset", at_least=1
    )
    profile_steps: str | None = flag(None, "the same two numbers, as START,END", spelled=("--profile_steps",))
    profile_ranks: tuple[int, ...] = flag((0,), "the ranks whose steps are profiled", nargs="+", at_least=0)

    @property
    def profile_is_full(self) -> bool:
        """Whether a profile has shapes, memory and stacks."""
        return self.profile is not None and "pt-full" in self.profile

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step of the profile; None without one."""
        if self.profile is None:
            return None
        start, end = _two_numbers(self.profile_steps or "") or (self.profile_step_start, self.profile_step_end)
        if start is None:
            start = _START if end is None else max(0, end - _STEPS)
        return start + 1, start + _STEPS if end is None else end

    def problems(self) -> Iterator[str]:
        if len(self.profile or ()) > 1:
            yield f"--profile {' '.join(self.profile or ())} names {len(self.profile or ())} kinds. Name one, or none."
        if self.profile_steps is not None and _two_numbers(self.profile_steps) is None:
            yield f"--profile-steps {self.profile_steps} is not START,END. Write two whole numbers, for example 2,4."
        elif self.profile_steps is not None and (self.profile_step_start, self.profile_step_end) != (None, None):
            yield (
                f"--profile-steps {self.profile_steps} says the same as --profile-step-start and --profile-step-end. "
                "Drop one of the two."
            )
        elif self.profiled_steps is not None and self.profiled_steps[0] > self.profiled_steps[1]:
            first, last = self.profiled_steps
            yield (
                f"--profile-step-end {last} is not after --profile-step-start {first - 1}, so no step is profiled. "
                f"Use --profile-step-end {first} for one step."
            )


def _two_numbers(text: str) -> tuple[int, int] | None:
    start, _, end = text.partition(",")
    return (int(start), int(end)) if start.strip().isdecimal() and end.strip().isdecimal() else None
