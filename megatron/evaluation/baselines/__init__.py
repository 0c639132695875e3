"""Closed-form language models that a network has to beat: uniform, unigram and bigram, fitted by counting.

They score the same queries as a network, so their figures stand beside its own.
"""
