#!/usr/bin/env bash
# Installs the peers that `banyan bench --peers` measures, each with exact pins into an environment of its own:
# build/peers/transformers and build/peers/trl. Safe to run again: a complete environment is left as it is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
for peer in transformers trl; do
  env="$root/build/peers/$peer"
  if cmp -s "$here/$peer.txt" "$env/.installed"; then
    echo "$env: installed"
    continue
  fi
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/$peer.txt"
  cp "$here/$peer.txt" "$env/.installed"
  echo "$env: ready"
done
