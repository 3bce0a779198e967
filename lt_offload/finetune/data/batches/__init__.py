"""From tokenised documents to batches: what goes into a row, in which order rows come, and where a run goes on."""
