"""Records of a fine-tuning run with any strategy: metrics, samples, its end, a report."""
