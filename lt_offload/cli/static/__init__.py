"""What the command line knows about settings and verbs from their source alone: nothing that is slow is imported."""
