"""Command lines that documents and examples print, recorded, scaled down or given bad paths."""
