"""From typed dataclass fields to command-line flags: fields, sections, the command line, and upstream's other flags.

The only package that knows argparse. It knows no section of the configuration.
"""
