"""`kernels=False`: what one reads in model.py, attention.py and sampler.py is what runs."""

import sys
from pathlib import Path

from conftest import random_prompts, token_ids

from nanoengine import SamplingParams

FUNCTIONS = {
    "model.py": {"forward", "rms_norm", "rotate", "swiglu"}, "attention.py": {"gather_attention"},
    "sampler.py": {"sample", "likeliest", "scale", "truncate", "nucleus", "draw", "first_max"}}


def test_a_breakpoint_in_each_function_fires(make_llm):
    """And the tokens are the same in float32."""
    prompts = random_prompts([5, 40, 9])
    params = [SamplingParams(temperature=0, max_tokens=6),
              SamplingParams(seed=1, top_p=0.8, top_k=9, max_tokens=6),
              SamplingParams(seed=2, top_p=0.8, max_tokens=6)]
    with make_llm() as llm:
        expected = token_ids(llm.generate(prompts, params, use_tqdm=False))
    reached = {name: set() for name in FUNCTIONS}
    with make_llm(kernels=False) as llm:
        assert llm.engine.runner.backend == "gather"
        kinds = {type(module).__module__ for module in llm.engine.runner.model.modules()}
        assert not any("nanoengine_" in kind for kind in kinds), kinds

        def trace(frame, event, argument):
            file = Path(frame.f_code.co_filename)
            if file.parent.name == "nanoengine" and file.name in reached:
                reached[file.name].add(frame.f_code.co_name)

        sys.settrace(trace)
        try:
            found = token_ids(llm.generate(prompts, params, use_tqdm=False))
        finally:
            sys.settrace(None)
    assert found == expected
    for name, functions in FUNCTIONS.items():
        assert functions <= reached[name], (name, functions - reached[name])
