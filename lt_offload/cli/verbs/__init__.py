"""What ``lt-finetune`` does, one verb a file. A verb's keyword parameters are flags, its docstring is help."""
