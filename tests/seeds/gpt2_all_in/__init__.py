"""The scenarios of GPT-2 all in."""
