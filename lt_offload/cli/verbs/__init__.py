"""Verbs of ``lt-finetune``, one a file. A verb's keyword parameters are flags, its docstring is help."""
