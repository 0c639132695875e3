"""Rules between sections that need nothing but the sections."""
