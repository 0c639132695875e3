"""Configurations as tables: secrets stay out, and differences come in a useful order."""

from __future__ import annotations

from megatron.observe.dashboard.configuration import differences, given, rows

FIRST = {
    "control": {"run_dir": "runs/a", "eval_interval": 10},
    "data": {"train": "mongodb://ali:hunter2@host/db?collection=c", "blend": [0.5, "mongodb://x:pass9word@h/d"]},
    "optim": {"lr": 0.001},
    "provenance": {"optim.lr": "given", "data.blend": "default", "control.run_dir": "file x.yaml"},
}


def test_rows_are_named_by_section_and_field_and_hold_no_secret() -> None:
    table = rows(FIRST)
    assert table["optim.lr"] == "0.001" and table["control.eval_interval"] == "10"
    assert "provenance" not in " ".join(table) and rows({"version": 3}) == {"version": "3"}
    shown = " ".join(table.values())
    assert "hunter2" not in shown and "pass9word" not in shown and "***" in shown
    assert given(FIRST) == ["control.run_dir", "optim.lr"] and given({}) == []


def test_differences_end_with_the_folders() -> None:
    second = {**FIRST, "control": {"run_dir": "runs/b", "eval_interval": 10}, "optim": {"lr": 0.002, "beta": 1}}
    assert differences([rows(FIRST), rows(second)]) == ["optim.lr", "optim.beta", "control.run_dir"]
    assert differences([rows(FIRST), rows(FIRST)]) == [] == differences([])
