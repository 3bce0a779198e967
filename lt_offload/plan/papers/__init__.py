"""Methods as their papers describe them, chosen by name; ``auto`` asks those of weight offloading, too."""
