"""The scenarios of Turkish GPT-2."""
