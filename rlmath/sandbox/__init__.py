"""A model's Python code, run where the kernel confines it.

It has no files, no network, no processes, and limited time and memory.

    engine's leader: Sandboxes -- socket --> server -- fork --> sandboxes, one for each completion
    that has calls

`sandboxes.Sandboxes` is the package's face, `calls` has its records. The server is a program of its
own that imports numpy and sympy once, forks sandboxes ahead, and judges every call by what it
measures itself. Imports no torch.
"""
