"""Devices and links by name, and devices from files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from trident.plan.hardware import DEVICES, Cluster, Links, device_of, links_of_device


def test_a_device_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    device = dataclasses.replace(DEVICES["h100"], name="mine", product_share=0.5)
    path.write_text(json.dumps(dataclasses.asdict(device)))
    assert device_of(str(path)) == device


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peak": 0}, r"mine\.json: peak is 0\. It must be a number above 0\."),
        ({"traffic_share": 1.5}, r"traffic_share is 1\.5\. It must be a number above 0 and at most 1\."),
        ({"attention_saturation": [1000]}, r"attention_saturation is \[1000\]\. It must be two numbers above 0\."),
        ({"name": None}, r"name is None\. It must be a string\."),
        ({"saturation": True}, r"saturation is True\. It must be a number above 0\."),
        ({"peek": 1}, r"mine\.json: unknown constant 'peek'\. Use name, .*peak"),
        (None, r"peak is missing\. It must be a number above 0\."),
    ],
)
def test_a_file_without_constants_is_refused(tmp_path: Path, change: dict[str, object] | None, sentence: str) -> None:
    path = tmp_path / "mine.json"
    constants = {} if change is None else {**dataclasses.asdict(DEVICES["h100"]), **change}
    path.write_text(json.dumps(constants))
    with pytest.raises(ConfigError, match=sentence):
        device_of(str(path))


def test_a_file_without_a_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"--device .*mine\.json contains a list\. It must be a mapping"):
        device_of(str(path))


@pytest.mark.parametrize(
    ("device", "name", "within", "between"),
    [
        ("A100", "nvlink3+ib200", 300e9, 25e9),
        ("h200", "nvlink+ib400", 450e9, 50e9),
        ("b200", "nvlink5+ib400", 900e9, 50e9),
        ("mine.json", "nvlink+ib400", 450e9, 50e9),
    ],
)
def test_default_links_of_a_device(device: str, name: str, within: float, between: float) -> None:
    links = links_of_device(device)
    assert (links.name, links.within, links.between) == (name, within, between)


@pytest.mark.parametrize(
    ("devices_per_node", "between", "size", "stride", "bus", "link"),
    [
        (8, 12.5e9, 24, 1, 100e9, 12.5e9),  # 3 nodes with 4 cards of 25 GB/s: NVIDIA/nccl-tests#119 measured 96 GB/s
        (8, 25e9, 32, 1, 200e9, 25e9),
        (8, 50e9, 32, 1, 300e9, 50e9),  # 8 cards of 50 GB/s are faster than the links within the node
        (8, 25e9, 32, 4, 50e9, 25e9),
        (8, 25e9, 32, 8, 25e9, 25e9),
        (8, 25e9, 4, 64, 25e9, 25e9),
        (8, 25e9, 6, 2, 50e9, 25e9),  # 4 of the ranks in one node, 2 in the other
        (8, 25e9, 3, 4, 25e9, 25e9),
        (4, 25e9, 8, 1, 100e9, 25e9),
        (8, 25e9, 8, 1, 300e9, 300e9),
        (8, 25e9, 2, 4, 300e9, 300e9),
    ],
)
def test_collectives_between_nodes_use_the_cards_of_their_ranks(
    devices_per_node: int, between: float, size: int, stride: int, bus: float, link: float
) -> None:
    cluster = Cluster(DEVICES["a100"], Links("", 300e9, between, 0.0, ""), 256, devices_per_node)
    assert cluster.bus_bandwidth(size, stride) == bus
    assert cluster.link_bandwidth(size, stride) == link
