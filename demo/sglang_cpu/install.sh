#!/usr/bin/env bash
# Installs SGLang for a CPU. usage: install.sh VENV_DIR [RELEASE]
#
# Without RELEASE (or with the base release): a virtual environment in VENV_DIR, 2.6 GB.
# With another RELEASE: an overlay of 0.2 GB in .sglang/RELEASE beside VENV_DIR, which is put before
# the environment's packages. Does nothing when it is there already.
# PYTHON: the interpreter to make the environment with (default python3.11).
set -euo pipefail

base_release=0.5.23
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install.sh VENV_DIR [RELEASE]}
release=${2:-$base_release}
pip_options=(--quiet --quiet --disable-pip-version-check --no-input)

case $release in
  "$base_release") overlay=() ;;
  0.5.15.post1) overlay=(transformers==5.12.1 tokenizers==0.22.2) ;;
  0.5.10.post1) overlay=(transformers==5.3.0 tokenizers==0.22.2) ;;
  *) echo "install.sh: no recipe for SGLang $release (0.5.23, 0.5.15.post1, 0.5.10.post1)" >&2; exit 2 ;;
esac

if ! compgen -G "$venv/lib/python3.*/site-packages/sglang-$base_release.dist-info" > /dev/null; then
  "${PYTHON:-python3.11}" -m venv "$venv"
  "$venv/bin/python" -m pip install "${pip_options[@]}" torch==2.13.0
  "$venv/bin/python" -m pip install "${pip_options[@]}" --no-deps \
    -r "$here/requirements.lock" "sglang==$base_release"
fi
if [ ${#overlay[@]} -gt 0 ]; then
  target=$(cd "$venv/.." && pwd)/.sglang/$release
  if [ ! -d "$target/sglang-$release.dist-info" ]; then
    rm -rf "$target" "$target.partial"
    "$venv/bin/python" -m pip install "${pip_options[@]}" --no-deps \
      --target "$target.partial" "sglang==$release" "${overlay[@]}"
    mv "$target.partial" "$target"
  fi
fi
