"""Writes the golden list of flags anew: `python -m tests.config.golden.write_flags`."""

from tests.config.flags.test_legacy import GOLDEN, golden_text

if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
