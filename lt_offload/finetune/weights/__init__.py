"""Where weights come from and where they go: safetensors, GGUF, the hub; vocabularies and frozen parts."""
