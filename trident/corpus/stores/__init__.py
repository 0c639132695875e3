"""Document stores in the corpus tools: tables as inputs, imports, and inspection, timing and sampling.

Reading a store by index belongs to `megatron/data/stores`. This package is imported only for inputs in a database.
"""
