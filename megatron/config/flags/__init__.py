"""Command-line flags from typed dataclass fields, and tables of upstream's other flags.

The only package that uses argparse. It does not refer to sections of the configuration.
"""
