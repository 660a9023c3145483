"""01: a data set of conversations becomes prompts, one question a row.

Reads   prompts.source: JSON, JSONL or Parquet, a directory of them, or a hub data set
Writes  RUN/01_prompts/prompts.jsonl, errors.jsonl

    python 01_prepare_data.py --run runs/tiny --preset presets/tiny.yaml
"""

from eagle3_train.cli import stage_main
from eagle3_train.prompts import prepare
from eagle3_train.run import PROMPTS

if __name__ == "__main__":
    stage_main(PROMPTS, prepare, __doc__)
