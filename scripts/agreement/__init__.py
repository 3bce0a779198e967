"""Whether other packages make the same tokens, masks and sequences of the same rows."""
