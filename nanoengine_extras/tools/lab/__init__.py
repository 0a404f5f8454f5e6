"""Experiments with the engine's policies.

    python -m nanoengine_extras.tools.lab.NAME

    compare memory      variants of a policy on one workload
    simulate memory     the same on a clock: Llama-3-8B on an A100

`options.py` has the flags and the workloads, `figures.py` the measured figures of a run, and
`limits.py` the least time that a step can take.
`drawing.py` makes pictures of a trace, also of your own runs. `bench.py` in the root of the
repository measures throughput. Run these commands there: the models and shapes are not installed.
"""
