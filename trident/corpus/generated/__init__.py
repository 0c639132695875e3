"""Texts made by rule for examples and tests: a language's grammar, its words, and documents written with them.

Standard library only, and the same bytes on every machine. Nothing here reads a text of another author.
"""
