"""Batches of tokenised documents: the content of rows, their order, and the position at which a run goes on."""
