"""Filters that look at one document at a time: length, language, quality and repetition.

What needs earlier documents (duplicates) does not belong here.
"""
