"""The scenarios of dsGPT2."""
