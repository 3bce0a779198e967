"""Places of weights, states, sums and activations: on the host, on the device, on their way."""
