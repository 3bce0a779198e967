"""What a strategy says and does about processes and devices; with one of each it does next to nothing."""
