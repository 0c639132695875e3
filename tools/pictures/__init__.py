"""The drawings of the documents, as programs: `python tools/draw_pictures.py` writes them to docs/pictures."""
