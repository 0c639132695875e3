"""Samples for masked language models: text, some of whose tokens are hidden and to be predicted.

How samples are made (`sentences`, `documents` and `stream`) and how their tokens are chosen (`phrases`, `tokens`). What
is hidden follows from the seed and the sample's number alone, so every rank, every layout and every resume sees the
same.
"""
