"""llama.cpp's GGUF files: they become a folder like that of any model, whose tensors `quantized`
loads.

    reader.py       opens a file, whose sizes are checked; the tokens that end a text
    header.py       what a file says about its model, as a config.json; the places of its tensors
    names.py        the names of tensors
    families.py     how families of models differ, a row each; what their files leave out is in
    layers.py, dense.py, experts.py
    numbers.py      the types of matrices
    tokenizers.py   the tokenizer
    files.py        the folder, and the tensors
"""
