"""00: is this box, this verifier and this disk fit for this run? Found out before anything is spent on it.

Reads   the configuration, the verifier's files (headers, not weights), this machine
Writes  RUN/00_preflight/preflight.json

Each line of the table is a check: pass, warn (slower than need be, or not to be known here) or fail, with the remedy
below it. Exit code 1 when the run would fail, 0 else. Runs on any machine, with or without a GPU, as often as wanted:
about 6 s on 2 cores without a GPU, for Kimi-K2.5's 208,381 tensors as well; 256 MiB are written and removed.

    python 00_preflight.py --run runs/tiny
"""

from eagle3_train.cli import exit_with
from eagle3_train.preflight import main

if __name__ == "__main__":
    exit_with("00_preflight.py", lambda: main(None, __doc__))
