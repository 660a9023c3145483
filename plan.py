"""What a run will take, before it is started: hours, tokens, disk, GPU-hours and price of every stage.

Reads   a preset, and with --from the timings.jsonl of a real run
Writes  nothing; with --picture a bar chart, with --update the tables of a document between its plan markers

Every figure says whether it was measured, published (a prior) or derived (an estimate). Over a budget it refuses,
exit code 1, and says what would fit.

    python plan.py --preset presets/tiny.yaml --from runs/tiny --max-samples 4000
    python plan.py --verifier.path moonshotai/Kimi-K2.5 --box rtx6000x8 --box b300x8 --price 0 --price 48
    python plan.py --update next-steps-eagle.md --from benchmarks/results/tiny_timings.jsonl
"""

import sys

from eagle3_train.plan_command import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
