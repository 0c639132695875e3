"""Gathers what a run shows before its first step."""
