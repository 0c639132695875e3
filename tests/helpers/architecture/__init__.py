"""The project's rules, what they go by, and questions about parsed files."""
