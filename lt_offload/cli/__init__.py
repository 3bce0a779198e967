"""The command line, ``lt-finetune``."""
