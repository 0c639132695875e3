"""Both versions of the manifest, and how descriptions become rows."""
