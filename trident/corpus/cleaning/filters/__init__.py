"""Filters of single documents: length, language, quality and repetition.

Deduplication, which needs earlier documents, does not belong here.
"""
