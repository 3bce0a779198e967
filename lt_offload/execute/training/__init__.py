"""What an engine is made of: passes, what a loop says between them, the host copies, and who goes on after it."""
