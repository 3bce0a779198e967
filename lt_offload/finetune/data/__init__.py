"""The data side of fine-tuning: from files and rows to token batches in an exact, resumable order."""
