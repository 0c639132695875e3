"""Writing document stores: importing documents, and examining, timing and sampling a store.

Reading a store by number belongs to `data/stores`.
"""
