"""The tables and figures of the papers beside what the planners here make of their inputs: ``make papers``."""
