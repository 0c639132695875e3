"""Requests while they are computed: a fair queue, the loop that steps the engine, and what arrives for each request."""
