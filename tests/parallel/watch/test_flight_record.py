"""The last messages of a rank, from torch's flight recorder, and after its stacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron.parallel import messages
from megatron.parallel.joining import open_mesh
from megatron.parallel.watch import flight_record
from megatron.parallel.watch.flight_record import last_messages
from megatron.parallel.watch.stacks import main_stack, read_stacks
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks


def exchange(rank: int) -> tuple[str, str, str]:
    mesh = open_mesh(Layout())
    for size in range(1, 16):
        messages.all_reduce_sum(torch.zeros(size), mesh.world)
    stacks, _ = read_stacks(16_384)
    return last_messages(), stacks, read_stacks(600)[0]


def test_the_last_messages_follow_the_stacks() -> None:
    for shown, stacks, short in run_ranks(exchange, 2):
        lines = shown.splitlines()
        assert len(lines) == 12 and "all_reduce" in lines[-1] and "[[15]] Float" in lines[-1] and "[[4]]" in lines[0]
        assert stacks.endswith(f"\nlast messages:\n{shown}") and "all_reduce" not in main_stack(stacks)
        assert len(short) <= 600 and short.endswith(lines[-1])


@pytest.mark.parametrize("content", [b"no JSON", b"{}", json.dumps({"entries": []}).encode()])
def test_without_a_record_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    for name in flight_record._RECORDERS:
        monkeypatch.setattr(flight_record._distributed_c10d, name, lambda: content, raising=False)
    assert last_messages() == ""


def test_nccls_recorder_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    entry: dict[str, Any] = {"profiling_name": "nccl:send", "is_p2p": True, "p2p_seq_id": 7, "state": "started"}
    entry |= {"process_group": ["3", "pp"], "input_sizes": [[2, 3]], "input_dtypes": ["BFloat16"]}
    dump = json.dumps({"entries": [entry]}).encode()
    monkeypatch.setattr(flight_record._distributed_c10d, "_dump_nccl_trace_json", lambda: dump, raising=False)
    assert last_messages() == "  nccl:send 7 of group 3 pp: [[2, 3]] BFloat16, started"
