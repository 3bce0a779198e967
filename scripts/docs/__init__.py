"""What makes the documentation: pages from the code, pictures from plans."""
