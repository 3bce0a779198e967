"""Storage forms of frozen weights."""
