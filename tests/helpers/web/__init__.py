"""A server and a browser."""
