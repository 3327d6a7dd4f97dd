"""Operations and their kernels. Knows nothing of models or policies, nor why an expert lies where it does.

`ops.py` is the interface, one folder per operation holds its definition in PyTorch, `csrc/` the C++.
"""
