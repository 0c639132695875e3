"""What training does with the compiled operations."""
