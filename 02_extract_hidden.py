"""02: the verifier's hidden states for every token of every trace, checked, in speculators' own layout.

Reads   RUN/01_prompts (the split), RUN/01b_traces
Writes  RUN/02_hidden/shards, index.jsonl, dataset/, parity.jsonl, errors.jsonl, server.log

The verifier is loaded by vLLM, split over verifier.tensor_parallel_size GPUs, unless 01b has saved every state
already. Before anything is kept, and at each restart, a few canaries must give the server's own log-probs, the same
states alone and in a full batch, and those that the run began with. A token costs 4 x hidden size x 2 bytes: 57,344 B
for Kimi-K2.5, half with --extraction.storage_dtype float8_e4m3. Stopped at any moment, by a full disk as well, the
same command goes on. Within --extraction.disk_budget_gb it makes what 04 reads next, and is run again after 04 has.

    python 02_extract_hidden.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.extraction import extract, wants_more
from eagle3_train.run import HIDDEN

if __name__ == "__main__":
    stage_main(HIDDEN, extract, __doc__, wants_more=wants_more)
