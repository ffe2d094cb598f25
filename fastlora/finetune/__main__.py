"""`python -m fastlora.finetune`, which is also what `torchrun -m fastlora.finetune` starts."""

import sys

from fastlora.finetune import main

if __name__ == "__main__":
    sys.exit(main())
