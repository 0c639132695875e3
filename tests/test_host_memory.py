"""How much memory there is, and how much is left, on machines and in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.host_memory import available_memory_bytes, total_memory_bytes

MEMINFO = "MemTotal:       24000 kB\nMemFree:        900 kB\nMemAvailable:   20000 kB\n"


def machine(root: Path, files: dict[str, str]) -> tuple[int | None, int | None]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return available_memory_bytes(root), total_memory_bytes(root)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None)),
        ({"proc/meminfo": MEMINFO + "SwapTotal: 1000 kB\n"}, (20000 * 1024, 25000 * 1024)),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"}, (20000 * 1024, 24000 * 1024)),
        (  # version 2, as a container sees it: its own group is the root
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "5000\n",
                "sys/fs/cgroup/memory.current": "3000\n",
                "sys/fs/cgroup/memory.stat": "anon 2000\ninactive_file 700\n",
            },
            (2700, 5000),
        ),
        (  # the limit of a group above counts too
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/slurm/job\n",
                "sys/fs/cgroup/slurm/job/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job/memory.current": "10\n",
                "sys/fs/cgroup/slurm/memory.max": "4000\n",
                "sys/fs/cgroup/slurm/memory.current": "4100\n",
            },
            (0, 4000),
        ),
        (  # version 1
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9000\n",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "5000\n",
                "sys/fs/cgroup/memory/docker/x/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            (4100, 9000),
        ),
    ],
    ids=["unknown", "machine", "no limit", "version 2", "group above", "version 1"],
)
def test_memory_is_limited_by_machine_and_groups(
    tmp_path: Path, files: dict[str, str], expected: tuple[int | None, int | None]
) -> None:
    assert machine(tmp_path, files) == expected


def test_this_machine_has_memory_left() -> None:
    if Path("/proc/meminfo").exists():
        assert 0 < (available_memory_bytes() or 0) <= (total_memory_bytes() or 0)
