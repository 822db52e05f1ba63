#!/usr/bin/env bash
# Installs the clients that tests/peers runs against `banyan serve`, each with exact pins into an environment of its own:
# build/peers/clients (openai, schemathesis) and build/peers/lm_eval. A complete environment is left as it is.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
for peer in clients lm_eval; do
  list="$root/requirements/peers-${peer/_/-}.txt"
  env="$root/build/peers/$peer"
  if cmp -s "$list" "$env/.installed"; then
    echo "$env: installed"
    continue
  fi
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check -r "$list"
  cp "$list" "$env/.installed"
  echo "$env: ready"
done
