"""Damaged and hostile files, and what reads them."""
