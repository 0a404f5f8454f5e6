"""Times decode steps over a grid of batches and contexts, beside their limits: see `limits.py`.

    python -m lab.grid --config qwen3-0.6b --plot grid.png
"""

import sys

from lab.limits import main

if __name__ == "__main__":
    main(sys.argv[1:], (1, 2, 4, 8, 16, 32, 64, 128, 256), (128, 512, 2048, 8192))
