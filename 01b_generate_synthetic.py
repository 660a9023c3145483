"""01b: the verifier answers every question; its thinking and answers are kept as token ids.

Reads   RUN/01_prompts
Writes  RUN/01b_traces/traces.jsonl, errors.jsonl, server.log

Starts a vLLM server with the verifier, or uses a running one (--endpoint http://127.0.0.1:8000/v1).
Stopped at any moment, the same command asks only what is missing.

    python 01b_generate_synthetic.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.generation import generate
from eagle3_train.run import TRACES

if __name__ == "__main__":
    stage_main(TRACES, generate, __doc__)
