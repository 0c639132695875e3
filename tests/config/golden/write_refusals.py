"""Writes the outcomes of the listed command lines anew: `python -m tests.config.golden.write_refusals`."""

from tests.config.refusals import REFUSALS, VALUES, golden_text

if __name__ == "__main__":
    for path in (REFUSALS, VALUES):
        path.write_text(golden_text(path), encoding="utf-8")
