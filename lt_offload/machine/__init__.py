"""Host memory and device memory as system and driver give them: pages, pinning, copies, who has taken how much."""
