"""NCCL with a single rank: the calls of nanoengine_extras/running/tensor_parallel.py, also in a
graph.

It shows that what rank 0 does works, and that a process with graphs of NCCL comes to its end.
"""

import torch

from nanoengine_extras.running.tensor_parallel import Group

group = Group(1)
group.connect("cuda")
x = torch.ones(4, 8, device="cuda", dtype=torch.bfloat16)
assert group.least(7) == 7, "of one rank"
with torch.inference_mode():
    group.join(group.sum(x * 2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = group.join(group.sum(x * 2))
    for number in range(3):
        x.fill_(number)
        graph.replay()
        assert (found == 2 * number).all(), found
    group.finish(group.backend.broadcast([x]))
print("replayed, now the end", flush=True)
del graph
group.backend.abort()
print("== ok, and it ended")
