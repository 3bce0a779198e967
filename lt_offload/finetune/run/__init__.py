"""Records of a fine-tuning run: metrics, samples, how it ended, a report. Works with any strategy."""
