"""03: which tokens the draft may propose, with a report of how much of the verifier's speech they cover.

Reads   RUN/02_hidden/dataset
Writes  RUN/03_vocab/token_freq.pt, d2t.npy, t2d.npy, coverage.json, coverage.png

    python 03_build_vocab_map.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.run import VOCAB
from eagle3_train.vocabulary import build

if __name__ == "__main__":
    stage_main(VOCAB, build, __doc__)
