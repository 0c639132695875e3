"""Requests while they are computed: a fair queue, the thread that steps the engine, and what arrives at each request."""
