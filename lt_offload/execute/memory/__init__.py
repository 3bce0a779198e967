"""Where weights, states, sums and activations are: on the host, on the device, on their way."""
