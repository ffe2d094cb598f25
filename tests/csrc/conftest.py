"""The compiled extension is optional; its tests are not, where it can be had."""

import importlib.util

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("fastlora._C") is None:
    # Nothing here can run: test_missing.py stands in, and says what would.
    collect_ignore_glob = ["test_[!m]*.py"]
