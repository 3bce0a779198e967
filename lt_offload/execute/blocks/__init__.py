"""A block's run: in parts or whole, its saved tensors, its second run, its gradients."""
