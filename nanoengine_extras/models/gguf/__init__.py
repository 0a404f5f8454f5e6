"""llama.cpp's GGUF files: they become a folder like that of any model, whose tensors `quantized`
loads.

    reader.py       opens a file, whose sizes are checked; the tokens that end a text
    header.py       what a file says about its model, as a config.json; the places of its tensors
    families.py     what it leaves out, by the model's family
    numbers.py      the types of matrices
    tokenizers.py   the tokenizer
    files.py        the folder, and the tensors

A file leaves out numbers that llama.cpp has in its code, and stores some tensors in another form.
The numbers here are from llama.cpp (src/models), and the forms from its converter
(conversion/gemma.py, phi.py and others).
"""
