"""The compiled operations of `csrc/ops`: building them, loading them, what was measured, and what is in use."""
