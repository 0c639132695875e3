"""Configurations as tables: secrets stay out, and differences come in a useful order."""

from __future__ import annotations

from trident.dashboard.configuration import differences, given, rows

FIRST = {
    "report": {"run_dir": "runs/a"},
    "evaluation": {"eval_interval": 10},
    "data": {"train": "mongodb://ali:hunter2@host/db?collection=c", "blend": [0.5, "mongodb://x:pass9word@h/d"]},
    "optim": {"lr": 0.001},
    "provenance": {"optim.lr": "given", "data.blend": "default", "report.run_dir": "file x.yaml"},
}


def test_rows_are_named_by_section_and_field_and_hold_no_secret() -> None:
    table = rows(FIRST)
    assert table["optim.lr"] == "0.001" and table["evaluation.eval_interval"] == "10"
    assert "provenance" not in " ".join(table) and rows({"version": 3}) == {"version": "3"}
    shown = " ".join(table.values())
    assert "hunter2" not in shown and "pass9word" not in shown and "***" in shown
    assert given(FIRST) == ["optim.lr", "report.run_dir"] and given({}) == []


def test_differences_end_with_the_folders() -> None:
    second = {**FIRST, "report": {"run_dir": "runs/b"}, "optim": {"lr": 0.002, "beta": 1}}
    assert differences([rows(FIRST), rows(second)]) == ["optim.lr", "optim.beta", "report.run_dir"]
    assert differences([rows(FIRST), rows(FIRST)]) == [] == differences([])
