"""Samples for masked language models: text with some tokens masked, which the model predicts.

Samples consist of `sentences`, `documents` or a `stream`; `phrases` or single `tokens` are masked. The mask depends on
the seed and the sample's index alone, so it is the same on every rank, in every layout and after a resume.
"""
