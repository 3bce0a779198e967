"""What a change of structure must not alter: plans byte for byte, and the engine's calls of a device."""
