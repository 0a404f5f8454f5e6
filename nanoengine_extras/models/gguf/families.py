"""GGUF files of families that transformers computes, such as Gemma, Phi, Granite and Mixtral.

A file leaves out numbers that llama.cpp has in its code, and stores some tensors in another form.
The numbers here are from llama.cpp (src/models), and the forms from its converter
(conversion/gemma.py, phi.py and others).

    family.py     the class of a family, and functions that several share
    gemma.py, dense.py, experts.py, deepseek.py
                  the families, by `general.architecture`
"""

from nanoengine_extras.models.gguf import dense, deepseek, experts, gemma

# "mixtral" is a "llama" with experts
FAMILIES = gemma.FAMILIES | dense.FAMILIES | experts.FAMILIES | deepseek.FAMILIES
