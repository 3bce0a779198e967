"""Settings and verbs of the command line, known from text files: nothing that is slow is imported."""
