"""The flags of the network's architecture, by part of the network; `sections/model.py` joins them into one section."""
