"""What a fine-tuning run leaves behind: metrics, samples, how it ended, a report. Works with any strategy."""
