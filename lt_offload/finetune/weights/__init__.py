"""Weights from files and into files: safetensors, GGUF, the hub; vocabularies and frozen parts."""
