"""What a run of a block sees and leaves behind: state of its modules, and the contexts around it."""
