"""Operations: one file each, with its equation, its autograd Function and its reference.

``reference.py`` and ``cpu.py`` implement all of them for the backends ``torch`` and ``cpu``;
``fastlora.kernels`` does for ``triton``. :mod:`fastlora.functional` is the checked way in.
"""
