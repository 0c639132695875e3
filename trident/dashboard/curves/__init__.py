"""Curves of one or more runs: read from their records, smoothed, drawn as text and as images, compared step by step."""
