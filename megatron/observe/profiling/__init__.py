"""Profiles of single steps, written into the run folder."""
