"""Packages put first on the path of SGLang's processes on a machine without CUDA. Nothing else may import from here."""
