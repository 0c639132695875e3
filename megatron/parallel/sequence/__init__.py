"""Sequences that are divided over ranks: who has which tokens, and attention between them.

Every rank computes on some positions of a sample; only attention needs others. Ulysses exchanges positions for heads
around it, and in a ring keys and values travel from rank to rank.
"""
