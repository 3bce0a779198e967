"""Settings and verbs of the command line, known from their source alone: nothing that is slow is imported."""
