"""01b: the verifier answers every question; its thinking and answers are kept as token ids.

Reads   RUN/01_prompts
Writes  RUN/01b_traces/traces.jsonl, errors.jsonl, server.log

Starts a vLLM server with the verifier, or uses a running one (--endpoint http://127.0.0.1:8000/v1).
With --generation.capture one_pass the hidden states are saved and checked as well, while the verifier answers
(01b_traces/states): 02 takes them over and loads no verifier.
Stopped at any moment, the same command asks only what is missing.

    python 01b_generate_synthetic.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.generation import generate
from eagle3_train.run import TRACES

if __name__ == "__main__":
    stage_main(TRACES, generate, __doc__)
