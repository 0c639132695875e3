"""Samples for masked language models: text with some tokens masked, which the model predicts.

Samples consist of sentences, documents or a stream (`--masked-samples`); spans of words are masked in sentences, single
tokens or whole words in the others. The mask depends on the seed and the sample's index alone, so it is the same on
every rank, in every layout and after a resume.
"""
