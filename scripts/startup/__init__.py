"""What passes before the first step: loading weights, imports, planning."""
