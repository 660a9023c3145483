"""05: the best checkpoint becomes the draft that vLLM serves, every tensor checked.

Reads   RUN/04_train/checkpoints/checkpoint_best
Writes  RUN/05_export/config.json, model.safetensors, README.md (model card)

    python 05_export_vllm.py --run runs/tiny
"""

from eagle3_train.cli import stage_main
from eagle3_train.export import export
from eagle3_train.run import EXPORT

if __name__ == "__main__":
    stage_main(EXPORT, export, __doc__)
