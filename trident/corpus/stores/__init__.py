"""Document stores in the corpus tools: a table as an input, importing documents, and examining, timing and sampling.

Reading a store by number belongs to `megatron/data/stores`. Nothing imports this before an input names a database.
"""
