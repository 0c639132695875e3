"""File operations for all other packages: opening untrusted files, durable replacement, appending, exact reads/writes.

Knows no file format but JSON and YAML. May import only `megatron/errors.py` and `megatron/secret_text.py`.
"""
