"""Imported once by the fork server, before it forks: a rank or a program then starts within milliseconds.

Nothing here may start a thread, because only the forking thread continues in the new process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing

# Besides the program, what PyTorch and DeepSpeed import on first use, which takes longer than a tiny run trains.
# Another version of them need not have all of it.
_MODULES = (
    "pretrain_gpt",
    "megatron.train.loop",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops",
    "deepspeed.ops.triton_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "gigatoken",
    "pytest",
    "tokenizers",
)
for _name in _MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

MAIN_PROCESS = multiprocessing.current_process()

# DeepSpeed looks for a compiler on first use and tries it several times. The answer is the same for every rank.
COMPATIBLE_OPERATIONS = importlib.import_module("deepspeed.ops").__compatible_ops__

# Without this, the first garbage collection of a rank would write to all memory that it shares with the server.
gc.collect()
gc.freeze()
