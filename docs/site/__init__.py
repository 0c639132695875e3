"""What is computed in the documents: the site's generated pages (`mkdocs build`), pictures, and tables."""
