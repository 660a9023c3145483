"""04: the draft is trained; the best checkpoint is the one with the highest expected acceptance.

Reads   RUN/02_hidden, RUN/03_vocab (or --prepared-data), and the verifier's embedding, head and final norm
Writes  RUN/04_train/checkpoints, metrics.jsonl, TensorBoard's files in trackers/, curves.png

Every visible GPU that --batch-size can use takes part. Stopped at any moment, the same command goes on from the last
whole checkpoint; Ctrl-C and SIGTERM save one first. Exit code 4: the states on disk are used up (--extraction.
disk_budget_gb), and 02 must make the next ones.

    python 04_train.py --run runs/tiny
    python 04_train.py --run runs/other --preset presets/tiny.yaml --prepared-data DIR  (a data set of speculators')
    torchrun --nnodes 2 --nproc-per-node 8 -- 04_train.py --run runs/big                (several machines, one disk)
"""

import os

from eagle3_train.cli import exit_with, stage_main
from eagle3_train.run import TRAIN
from eagle3_train.training import spec, train

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from eagle3_train import training_loop

        if os.environ["RANK"] != "0":
            exit_with(TRAIN.script, training_loop.follow)
        training_loop.lead(lambda: stage_main(TRAIN, train, __doc__, choose=spec))
    stage_main(TRAIN, train, __doc__, choose=spec)
