"""State that a run of a block sees and leaves behind: that of its modules, and the contexts around it."""
