"""Fine-tuning with Lightning: a module, a data module and what belongs to them. Works with any strategy."""
