#!/bin/sh
# Install whet @VERSION@ without a network:   sh install.sh [FOLDER]   (FOLDER: the new environment, venv next to this)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here/venv}
python=${PYTHON:-python3}
found=$("$python" -c 'import platform, sys; print("%d.%d %s" % (*sys.version_info[:2], platform.machine()))')
if [ "$found" != "@PYTHON@ @MACHINE@" ]; then
  echo "error: these wheels are for Python @PYTHON@ on @MACHINE@, and $python is $found" >&2
  echo "  fix: name another one: PYTHON=/path/to/python@PYTHON@ sh install.sh" >&2
  exit 1
fi
(cd "$here" && sha256sum --quiet --check SHA256SUMS)
"$python" -m venv --without-pip "$target"
pip=$(echo "$here"/wheels/pip-*.whl)
"$target/bin/python" "$pip/pip" install --quiet --no-index --no-deps "$here"/wheels/*.whl
if ! "$target/bin/python" -P -c 'import torch'; then
  echo "error: torch cannot be imported from $target; the lines above say why" >&2
  echo "  fix: make the bundle again where torch is installed by pip, on a machine like this one" >&2
  exit 1
fi
"$target/bin/whet" --version
model=@MODEL@ base=@BASE@
said="run: $target/bin/whet --help"
[ -z "$model" ] || said="$said; the model: $here/models/$model"
[ -z "$base" ] || said="$said, with --base_model_name_or_path $here/models/$base"
printf '%s\n' "$said"
