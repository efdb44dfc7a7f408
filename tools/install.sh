#!/bin/sh
# Makes a virtual environment with k3train in it (editable, dependencies pinned), or brings one up to date:
#   tools/install.sh VENV PYTHON [EXTRA ...]
#
# An environment that does not run, has another Python version, or was made for another folder (it was moved) is made anew.
set -eu

venv=$1
python=$2
shift 2
[ -n "$python" ] || exit 1 # the search for one has said why

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

version=$(version_of "$python")
pins=constraints/py$version.txt
if [ ! -f "$pins" ]; then
    echo "k3train does not run on Python $version ($python); it has: $(cd constraints && echo *.txt)" >&2
    exit 1
fi
if [ "$(version_of "$venv/bin/python" 2>/dev/null)" != "$version" ] || [ "$(cat "$venv/.made-for" 2>/dev/null)" != "$PWD" ]; then
    "$python" -m venv --clear "$venv"
    echo "$PWD" >"$venv/.made-for"
fi
extras=$(echo "$*" | tr ' ' ',')
echo "Installing k3train${extras:+ [$extras]} with Python $version into $venv: about a minute ..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$pins" -e ".${extras:+[$extras]}"

# Byte-compiling all that came takes pip four times as long as what k3train uses of it; this also shows that it loads.
PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" -c '
import flax.nnx, grain, jax.experimental.pallas, matplotlib.pyplot, optax, orbax.checkpoint, rich.progress, safetensors.numpy, tyro'
