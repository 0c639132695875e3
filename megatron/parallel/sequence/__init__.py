"""Sequences split over ranks: the tokens of each rank, and attention between them.

Every rank computes on some positions of a sample; only attention needs the others. Ulysses exchanges positions for
heads before and after attention; in a ring, keys and values are passed from rank to rank.
"""
