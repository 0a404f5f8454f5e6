"""What the CPU computes in kernels of our own: arrays in, arrays out, no word of an engine."""
