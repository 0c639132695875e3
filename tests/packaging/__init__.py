"""What visitors and installers get: the package, its versions, containers."""
