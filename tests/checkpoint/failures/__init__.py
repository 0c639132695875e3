"""Saves that fail, and files that are damaged."""
