"""Models from and for other software."""
