"""Loss curves that the repository keeps."""
