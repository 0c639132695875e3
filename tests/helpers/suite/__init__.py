"""How pytest runs the suite."""
