"""Processes that are killed, stopped or hang, and start again."""
