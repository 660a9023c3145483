"""05: the best checkpoint becomes the draft that vLLM serves; every tensor, the config and the logits are checked.

Reads   RUN/04_train/checkpoints/checkpoint_best, a few shards of the validation samples (RUN/02_hidden, or
        04's --prepared-data)
Writes  RUN/05_export/config.json, model.safetensors, README.md (model card)

--export.push_to OWNER/NAME uploads the finished checkpoint to the hub as well, also when it was made before.

    python 05_export_vllm.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.export import export, push
from eagle3_train.run import EXPORT

if __name__ == "__main__":
    stage_main(EXPORT, export, __doc__, afterwards=push)
