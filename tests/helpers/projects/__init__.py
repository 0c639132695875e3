"""Short runs of the programs of other projects."""
