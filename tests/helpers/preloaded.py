"""Imported once by the fork server, before it forks: a rank or a program then starts within milliseconds.

Nothing here may start a thread, because only the forking thread continues in the new process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import sys

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
    "tests.helpers.tiny_run",
    "tests.parity.layouts",
    "tests.parity.reference",
    "tokenizers",
)
# The server is started with -B where the environment asks for no bytecode; see conftest.py.
if sys.pycache_prefix is not None:
    sys.dont_write_bytecode = False
for _name in _MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

# What is read once from the declarations of the flags is then read for every rank.
importlib.import_module("megatron.config.parse").field_flags()
importlib.import_module("megatron.config.flags.legacy").legacy_flags()

MAIN_PROCESS = multiprocessing.current_process()


# Without this, the first garbage collection of a rank would write to all memory that it shares with the server.
gc.collect()
gc.freeze()
