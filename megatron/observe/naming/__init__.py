"""Names that new runs get: pure functions, and how one rank reserves a name for all."""
