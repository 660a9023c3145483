"""How a run is doing: every stage's state, done and total, rate, time left, cost so far, last errors, free disk.

Reads   RUN (any run directory, also while its stages write)
Writes  nothing, and takes no lock: safe from another shell at any time

    python status.py runs/tiny
    python status.py runs/tiny --watch 10
"""

import sys

from eagle3_train.status import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
