"""The manifest, and how descriptions become rows."""
