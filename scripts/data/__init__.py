"""Programs that compare the data side of fine-tuning with others."""
