"""Tests of what a run tells those who watch it."""
