"""A strategy's part in several processes and devices; with one of each it does next to nothing."""
