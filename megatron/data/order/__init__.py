"""Which sample comes when: splits, blends, the data plan, and the document, sample and shuffle index with their cache.

Everything here is a pure function of sizes, seeds and weights, or a cache of one; no token is read. The compiled index
builder (`csrc/index_builder`) is installed here and gives the same arrays as NumPy.
"""
