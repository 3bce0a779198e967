"""The batch size that trains most samples per second, and its plan."""
