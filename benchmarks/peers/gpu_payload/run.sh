#!/bin/bash
# vLLM beside mtpserve on a Hopper GPU without network. In the repository's root, on that machine:
#
#   bash benchmarks/peers/gpu_payload/run.sh PAYLOAD [options of peers/gpu.py]
#
# PAYLOAD: the folder that build.py wrote. PYTHON: the interpreter that has torch 2.11.0 (default: python3).
# PEERS_HOME: where it is unpacked, once (default: /tmp/mtpserve-peers). UNCHECKED=1: measure though check.py fails.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../../.." && pwd)
payload=${1:?the folder that build.py wrote}
shift
python=${PYTHON:-python3}
home=${PEERS_HOME:-${TMPDIR:-/tmp}/mtpserve-peers}

if [ ! -f "$home/unpacked" ]; then
    # Parts that an earlier call left in $home/parts come first.
    mkdir -p "$home/parts"
    cp "$payload"/peers.tar.xz* "$home/parts"
    cat "$home"/parts/* >"$home/peers.tar.xz"
    # r:xz and not r|xz: a stream copies the megabytes of zeros again for every block.
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2], filter="data")' "$home/peers.tar.xz" "$home"
    "$python" -m compileall -q -j 0 "$home/site" >/dev/null 2>&1 || true # some files are templates
    touch "$home/unpacked"
fi
# By links: were the repository itself on the path, its folder kernels/ would look like the package of that name, which transformers asks for.
mkdir -p "$home/source"
ln -sfn "$repository/mtpserve" "$home/source/mtpserve"
ln -sfn "$repository/kernels/mtpserve_kernels" "$home/source/mtpserve_kernels"
export PYTHONPATH=$home/site:$home/source
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 VLLM_CACHE_ROOT=$home/cache VLLM_WORKER_MULTIPROC_METHOD=spawn
export VLLM_USE_FLASHINFER_SAMPLER=0 # FlashInfer is not packed: greedy requests do not need its sampler
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo # there is no network
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
"$python" "$here/check.py" || [ -n "${UNCHECKED:-}" ] || { echo "vLLM's libraries do not compute here what they should" >&2; exit 1; }
exec "$python" "$repository/benchmarks/peers/gpu.py" --vllm "$python" "$@"
