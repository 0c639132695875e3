"""Whole runs, from flags to losses and exit codes."""
