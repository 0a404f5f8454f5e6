"""What only a GPU needs: attention kernels, CUDA graphs, fused operations, weights on the host.

The engine comes here in one line, `make_runner` in nanoengine/model_runner.py. Everything else
follows from that: `GpuRunner` is the engine's `ModelRunner` with what it overrides, attention.py
adds to the engine's table of backends, and operations.py fuses three functions of its model.
"""
