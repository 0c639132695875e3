"""Writes the golden list of DeepSpeed's keys anew: `python -m tests.config.golden.write_deepspeed_keys`."""

from tests.config.files.test_deepspeed_keys import GOLDEN, golden_text

if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
