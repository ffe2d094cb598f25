"""Triton kernels and their launchers: tensors in, tensors out; no autograd, no modules.

These six functions are the "triton" backend. They run on CUDA tensors, and on CPU tensors under the interpreter
(TRITON_INTERPRET=1, set before this package is imported).

The package is only ever imported as ``fastlora.kernels``. Run from a checkout, the top-level name
``kernels`` also resolves to this folder, and transformers looks for a package of that name that
somebody else owns: under that name nothing is here.
"""

if __name__ == "fastlora.kernels":
    from .dropout import philox_mask
    from .embedding import embedding_backward, embedding_forward
    from .glu import glu_backward, glu_forward
    from .projections import projections_backward, projections_forward

    __all__ = [
        "embedding_backward",
        "embedding_forward",
        "glu_backward",
        "glu_forward",
        "philox_mask",
        "projections_backward",
        "projections_forward",
    ]
