"""04: the draft is trained with speculators; the best checkpoint is the one with the highest expected acceptance.

Reads   RUN/02_hidden, RUN/03_vocab, and the verifier's embedding, head and final norm
Writes  RUN/04_train/checkpoints, metrics.jsonl, curves.png

Stopped at any moment, the same command goes on from the last whole checkpoint; Ctrl-C and SIGTERM save one first.

    python 04_train.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.run import TRAIN
from eagle3_train.training import train

if __name__ == "__main__":
    stage_main(TRAIN, train, __doc__)
