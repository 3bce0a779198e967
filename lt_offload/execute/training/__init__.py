"""Parts of an engine: passes, what a loop says between them, the host copies, and who goes on after it."""
