"""Sections about the course of a run: where it starts, what it saves and reports, how it is evaluated, what ends it."""
