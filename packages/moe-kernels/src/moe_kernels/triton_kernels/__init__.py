"""Triton kernels, a file for each operation. A module here is imported when its kernels are first needed."""
