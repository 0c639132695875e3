"""The drawings of the documents, as programs: `python docs/site/draw_pictures.py` writes them to docs/pictures."""
