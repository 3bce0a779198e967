"""Models as GGUF files: what is known of each family, their tokenizers, and the writing itself."""
