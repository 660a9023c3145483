#!/usr/bin/env bash
# On the GPU machine: makes VENV from the parts of pack.sh, over the packages that its Python has already.
#
#   bash benchmarks/gpu/unpack.sh FOLDER         of part.00, part.01, ...; makes FOLDER/venv
#
# No network, no pip; nothing outside FOLDER is written. BASE_PYTHON= names the Python that has torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(cd "${1:?usage: unpack.sh FOLDER}" && pwd)
base=${BASE_PYTHON:-python3}
venv=$folder/venv
[ -e "$venv/.whole" ] && exit 0
rm -rf "$venv" "$folder/site"
"$base" -m venv --without-pip "$venv"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat "$folder"/part.* | xz -T0 -dc | tar -C "$folder" -xf -
rmdir "$packages"
mv "$folder/site" "$packages"
# After what was packed comes what the machine has; before all, the checkout.
"$base" - >"$packages/machine.pth" <<'PYTHON'
import site
import sys

for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
PYTHON
echo "$root" >"$packages/eagle3_train.pth"
touch "$venv/.whole"
"$venv/bin/python" - <<'PYTHON'
from importlib.metadata import entry_points, version

for name in ("torch", "transformers", "vllm", "speculators", "datasets"):
    print(f"{name} {version(name)}", end=", ")
print("plugins", [point.value for point in entry_points(group="vllm.general_plugins")])
PYTHON
