"""The compiled operations of `csrc/ops`: build, loading, measured speeds, and the report of those in use."""
