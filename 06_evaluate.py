"""06: the draft on a live vLLM: acceptance on held-out prompts, speed, and proof that the answers are the verifier's.

Reads   RUN/01_prompts (the eval split) or evaluation.prompt_sets, RUN/05_export or evaluation.draft
Writes  RUN/06_eval/report.md, results.json, acceptance.csv, by_position.png, by_context.png, speed_up.png

Exit code 3 when a result is below the preset's floor; the report is written all the same.

    python 06_evaluate.py --run runs/tiny
    python 06_evaluate.py --run runs/tiny --evaluation.draft lightseekorg/kimi-k2.5-eagle3   (into 06_eval_<name>)
    python 06_evaluate.py --compare runs/a runs/b                                           (side by side)
"""

import sys

from eagle3_train.cli import stage_main
from eagle3_train.evaluation import evaluate, spec
from eagle3_train.report import compare_main
from eagle3_train.run import EVALUATE

if __name__ == "__main__":
    if "--compare" in sys.argv:
        sys.exit(compare_main(sys.argv[1:]))
    stage_main(EVALUATE, evaluate, __doc__, choose=spec)
