"""06: the draft on a live vLLM: acceptance on held-out prompts, and proof that the answers are still the verifier's.

Reads   RUN/01_prompts (the eval split), RUN/05_export
Writes  RUN/06_eval/report.md, results.json, acceptance.csv, acceptance.png, server.log

Exit code 3 when a result is below the preset's floor; the report is written all the same.

    python 06_evaluate.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.evaluation import evaluate
from eagle3_train.run import EVALUATE

if __name__ == "__main__":
    stage_main(EVALUATE, evaluate, __doc__)
