"""Writes the sentences of the refused command lines anew: `python -m tests.config.golden.write_refusals`."""

from tests.config.refusals import GOLDEN, golden_text

if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
