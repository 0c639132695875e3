"""The generated pages of the site (`mkdocs build`): flags, programs, interfaces, messages, files of the project."""
