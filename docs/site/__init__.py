"""Generated parts of the documents: pages of the site (`mkdocs build`), pictures and tables."""
