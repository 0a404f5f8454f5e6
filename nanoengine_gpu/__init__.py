"""What only a GPU needs: attention kernels, CUDA graphs, fused operations, weights on the host.

The engine imports it in one line, in `make_runner` (nanoengine/model_runner.py). `GpuRunner` is a
subclass of the engine's `ModelRunner`, attention.py adds to the engine's table of backends, and
operations.py fuses three functions of its model.
"""
