"""Requests of clients: limits, bounded JSON read into typed values, and the wording of refusals."""
