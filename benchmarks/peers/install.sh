#!/usr/bin/env bash
# Installs the peers that `banyan bench --peers` measures, each with exact pins into an environment of its own under
# build/peers: transformers, trl and vllm, or those named as arguments. llama_cpp is built from source (about ten minutes)
# and only if named. Safe to run again: a complete environment is left as it is.
#
# A line "# without dependencies: NAME==VERSION" of a list is installed by itself: vLLM's CPU wheel asks for torchvision,
# torchaudio and torchcodec, which text needs not, so vllm.txt lists what it needs less those three.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# -gt 0 ] || set -- transformers trl vllm
for peer in "$@"; do
  env="$root/build/peers/$peer"
  if cmp -s "$here/$peer.txt" "$env/.installed"; then
    echo "$env: installed"
    continue
  fi
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAVA_BUILD=OFF"
  pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" -r "$here/$peer.txt"
  for package in $(sed -n 's/^# without dependencies: //p' "$here/$peer.txt"); do
    "${pip[@]}" --no-deps "$package"
  done
  cp "$here/$peer.txt" "$env/.installed"
  echo "$env: ready"
done
