"""The order of samples: splits, blends, the data plan, and the document, sample and shuffle index with their cache.

Everything here is a pure function of sizes, seeds and weights, or a cache of one; no tokens are read. The compiled
index builder (`csrc/index_builder`) is installed here and returns the same arrays as NumPy.
"""
