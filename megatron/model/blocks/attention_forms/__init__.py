"""The forms of attention, one per file; a network's forms are chosen when it is built."""
